//! Other hosts that have layers of a model: the flags.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_engine::executor::Executor;
use kiln_llm::{Host, Stages};
use kiln_stage::{Keys, StageAddress};

/// Flags that name hosts with layers, and what hosts prove themselves with.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct StageFlags {
    /// Host that takes layers of the model, where `kiln stage` runs with the same file; may be given several times, in the order of the layers
    #[arg(long, value_name = "HOST:PORT")]
    stage: Vec<String>,
    /// Share of the layers for each device of this machine and then each --stage, as 3,2,1 [default: by free memory]
    #[arg(long, value_name = "SHARES", value_delimiter = ',', value_parser = crate::placing::share, requires = "stage")]
    stage_split: Vec<f64>,
    /// How long to wait for stages that cannot be reached yet when the program begins, as 2m
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = crate::commands::serve::duration, requires = "stage")]
    stage_wait: Duration,
    /// Certificate of this host for leader and stages (PEM); beyond this machine there must be one on both sides
    #[arg(long, value_name = "FILE", requires_all = ["stage_key", "stage_ca"])]
    stage_cert: Option<PathBuf>,
    /// The certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["stage_cert", "stage_ca"])]
    stage_key: Option<PathBuf>,
    /// Authority that the certificates of the other hosts come from (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["stage_cert", "stage_key"])]
    stage_ca: Option<PathBuf>,
}

/// A host that is reached over the network.
#[derive(Debug)]
struct Remote {
    address: StageAddress,
    /// How long to wait for it the first time. One that was lost is asked again by whoever needs it.
    wait: Mutex<Duration>,
}

/// How often a host that cannot be reached yet is tried.
const PACE: Duration = Duration::from_millis(500);

impl Host for Remote {
    fn name(&self) -> String {
        self.address.address.clone()
    }

    fn join(&self, fingerprint: [u8; 32]) -> Result<Box<dyn Executor>, kiln_engine::Error> {
        let wait = std::mem::take(&mut *self.wait.lock().unwrap_or_else(PoisonError::into_inner));
        let end = Instant::now() + wait;
        loop {
            match self.address.executor(fingerprint) {
                Ok(executor) => return Ok(Box::new(executor)),
                Err(kiln_stage::Error::Unreachable { .. }) if Instant::now() + PACE < end => std::thread::sleep(PACE),
                Err(why) => return Err(kiln_engine::Error::Run { why: why.to_string() }),
            }
        }
    }
}

impl StageFlags {
    /// Whether other hosts are to have layers.
    pub(crate) fn is_leader(&self) -> bool {
        !self.stage.is_empty()
    }

    /// What this host proves itself with.
    pub(crate) fn keys(&self) -> anyhow::Result<Option<Keys>> {
        let (Some(certificate), Some(key), Some(authority)) = (&self.stage_cert, &self.stage_key, &self.stage_ca)
        else {
            return Ok(None);
        };
        let read =
            |path: &Path| std::fs::read(path).map_err(|why| kiln_stage::Error::File { path: path.to_owned(), why });
        Ok(Some(Keys { certificate: read(certificate)?, key: read(key)?, authority: read(authority)? }))
    }

    /// The hosts that were named.
    pub(crate) fn stages(&self) -> anyhow::Result<Stages> {
        let keys = if self.is_leader() { self.keys()? } else { None };
        let host = |address: &String| -> anyhow::Result<Arc<dyn Host>> {
            let address = StageAddress::new(address, keys.clone()).map_err(in_flags)?;
            Ok(Arc::new(Remote { address, wait: Mutex::new(self.stage_wait) }))
        };
        let hosts = self.stage.iter().map(host).collect::<anyhow::Result<_>>()?;
        Ok(Stages { hosts, split: self.stage_split.clone() })
    }
}

/// An error of the network with the flags that help.
pub(crate) fn in_flags(why: kiln_stage::Error) -> anyhow::Error {
    let flags = "--stage-cert, --stage-key and --stage-ca";
    match &why {
        kiln_stage::Error::Unprotected { address } => anyhow::anyhow!(
            "{address} can be reached by other machines, and a stage does what it is told\nhint: {flags} let only hosts in that have a certificate of yours; without them a stage listens on 127.0.0.1 alone"
        ),
        kiln_stage::Error::Unproven { address } => anyhow::anyhow!(
            "the stage {address} is on another machine, and nothing proves who it is\nhint: {flags} do, on both sides"
        ),
        _ => why.into(),
    }
}
