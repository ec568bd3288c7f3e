//! One server among many behind a gateway: the flags.

use std::time::Duration;

use kiln_server::{Settings, TrustedProxy};

use crate::commands::serve::duration;

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
}

impl FleetFlags {
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
