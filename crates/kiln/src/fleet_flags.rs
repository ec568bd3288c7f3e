//! One server among many behind a gateway: the flags.

use std::time::Duration;

use anyhow::bail;
use kiln_engine::run::Engine;
use kiln_server::{KvEndpoint, KvEvents, Settings, TrustedProxy};

use crate::commands::serve::duration;
use crate::output::say;

/// The name of this machine, or of the container, as far as anything tells it.
fn host_name() -> String {
    let told = |name| std::env::var(name).ok().filter(|name: &String| !name.is_empty());
    let file = |path| std::fs::read_to_string(path).ok().map(|name| name.trim().to_owned());
    let name = told("HOSTNAME").or_else(|| file("/proc/sys/kernel/hostname")).or_else(|| told("COMPUTERNAME"));
    name.or_else(|| file("/etc/hostname")).unwrap_or_else(|| "kiln".to_owned())
}

/// Flags of a server that is one of many.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Behind a gateway")]
pub(crate) struct FleetFlags {
    /// Hold the status of a stream back until its first token, at most this long, as 30s: a gateway can then ask another server if this one is lost
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = duration)]
    late_headers: Duration,
    /// After SIGTERM, tell probes first and serve new requests for this long, as 5s: gateways learn with a delay that a server goes
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = duration)]
    drain_delay: Duration,
    /// What this server calls itself in the header `x-kiln-replica` and the metric `kiln:build_info` [default: the name of the host]
    #[arg(long, value_name = "NAME")]
    replica_name: Option<String>,
    /// Gateway whose header `x-kiln-tenant` or `x-forwarded-user` says who asks, as 10.0.0.7 or 10.0.0.0/8: each client then has limits and a prefix
    /// cache of its own. May be given several times
    #[arg(long, value_name = "ADDRESS", value_parser = str::parse::<TrustedProxy>)]
    trust_proxy: Vec<TrustedProxy>,
    /// Publish what the prefix cache holds at this address by ZeroMQ, as tcp://127.0.0.1:5557, in vLLM's format: routers then know where the beginning
    /// of a prompt lies. Who subscribes learns the tokens of all prompts and answers
    #[arg(long, value_name = "ENDPOINT")]
    kv_events: Option<KvEndpoint>,
    /// Address at which a subscriber asks again for events that it has missed, as tcp://127.0.0.1:5558
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events")]
    kv_events_replay: Option<KvEndpoint>,
    /// Topic of the events (default: `kv@REPLICA@MODEL`)
    #[arg(long, value_name = "TOPIC", requires = "kv_events")]
    kv_events_topic: Option<String>,
    /// Publish events beyond this machine: ZeroMQ has neither keys nor TLS here, and anyone who reaches the port reads what users write
    #[arg(long, requires = "kv_events")]
    allow_open_kv_events: bool,
}

/// Tells routers what the cache of a model holds.
#[derive(Clone, Debug)]
pub(crate) struct CacheTeller {
    events: KvEvents,
    replica: String,
    topic: Option<String>,
}

impl CacheTeller {
    /// Tells of this engine from now on.
    pub(crate) fn watch(&self, model: &str, engine: &mut Engine) {
        let topic = self.topic.clone().unwrap_or_else(|| format!("kv@{}@{model}", self.replica));
        engine.watch_cache(self.events.sink(topic));
    }
}

impl FleetFlags {
    /// Listens for those who want to know what caches hold, where that was asked for.
    pub(crate) fn teller(&self) -> anyhow::Result<Option<CacheTeller>> {
        let Some(endpoint) = self.kv_events else { return Ok(None) };
        let open = [Some(endpoint), self.kv_events_replay].into_iter().flatten().find(|at| !at.is_loopback());
        if let Some(open) = open.filter(|_| !self.allow_open_kv_events) {
            bail!(
                "{open} can be reached by other machines, and events tell what users write\nhint: --allow-open-kv-events publishes them all the same, as within a network policy that lets the router alone in"
            );
        }
        let events = KvEvents::listen(endpoint, self.kv_events_replay)?;
        say(&format!("events of the prefix cache at tcp://{}", events.address()));
        let replica = self.replica_name.clone().unwrap_or_else(host_name);
        Ok(Some(CacheTeller { events, replica, topic: self.kv_events_topic.clone() }))
    }

    /// The settings with what the flags say.
    pub(crate) fn apply(&self, settings: Settings) -> Settings {
        Settings {
            late_headers: self.late_headers,
            drain_delay: self.drain_delay,
            replica: self.replica_name.clone().unwrap_or_else(host_name),
            trusted_proxies: self.trust_proxy.clone(),
            ..settings
        }
    }
}
