//! What Prometheus sees of the server itself: requests by route and status, connections, bodies, the queue of requests that are being
//! prepared, and what the process takes of the machine.

use std::fmt::Write as _;

use axum::http::{Method, StatusCode};
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::app::App;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    method: &'static str,
    route: String,
    status: u16,
}

/// What is counted of requests.
pub(crate) struct HttpMetrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
}

impl HttpMetrics {
    /// Nothing was asked yet of the server of this name.
    pub(crate) fn new(replica: &str) -> HttpMetrics {
        let (mut registry, requests) = (Registry::default(), Family::default());
        let mut build = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        if !replica.is_empty() {
            build.push(("replica", replica.to_owned()));
        }
        registry.register("kiln:build", "The program, and which of several servers this is", Info::new(build));
        registry.register("kiln:http_requests", "Requests by route and status", Family::clone(&requests));
        HttpMetrics { registry, requests }
    }

    /// A request was answered. `route` is the pattern that its path fits; clients must not be able to make up labels.
    pub(crate) fn answered(&self, method: &Method, route: Option<&str>, status: StatusCode) {
        let method = match *method {
            Method::GET => "GET",
            Method::POST => "POST",
            Method::DELETE => "DELETE",
            Method::OPTIONS => "OPTIONS",
            Method::HEAD => "HEAD",
            _ => "other",
        };
        let route = route.unwrap_or("other").to_owned();
        self.requests.get_or_create(&Answered { method, route, status: status.as_u16() }).inc();
    }

    /// The counters of requests, in the form of the library.
    fn requests(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// Everything about the server, as metrics of the library's form and of Prometheus' own.
pub(crate) struct ServerMetrics {
    pub(crate) requests: String,
    pub(crate) gauges: String,
}

pub(crate) fn of_server(app: &App) -> ServerMetrics {
    let mut gauges = String::new();
    let mut add = |name: &str, kind: &str, help: &str, value: f64| {
        // Writing into a string does not fail.
        let _ = writeln!(gauges, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
    };
    let connections = app.connections.counts();
    add("kiln:http_connections", "gauge", "Open connections", connections.open as f64);
    add("kiln:http_connections_opened_total", "counter", "Connections that were opened", connections.opened as f64);
    let displaced = "Idle connections that were closed because others needed their places";
    add("kiln:http_connections_displaced_total", "counter", displaced, connections.displaced as f64);
    let refused = "Connections that were closed because every place was in use";
    add("kiln:http_connections_refused_total", "counter", refused, connections.refused as f64);
    let preparing = "Requests that wait to be tokenised and checked";
    add("kiln:preparation_queue", "gauge", preparing, app.prep_pool.waiting() as f64);
    add("kiln:request_body_bytes", "gauge", "Bytes of request bodies that are held", app.bodies.held() as f64);
    add("process_start_time_seconds", "gauge", "When the process began, in seconds since 1970", app.created as f64);
    if let Some(usage) = kiln_system::process::usage() {
        add("process_cpu_seconds_total", "counter", "Seconds of processors", usage.cpu_seconds);
        add("process_resident_memory_bytes", "gauge", "Bytes of memory", usage.resident_bytes as f64);
        add("process_virtual_memory_bytes", "gauge", "Bytes of address space", usage.virtual_bytes as f64);
        add("process_open_fds", "gauge", "Open files", usage.open_files as f64);
        if let Some(most) = usage.most_files {
            add("process_max_fds", "gauge", "Files that may be open", most as f64);
        }
        add("process_threads", "gauge", "Threads", usage.threads as f64);
    }
    ServerMetrics { requests: app.http.requests(), gauges }
}
