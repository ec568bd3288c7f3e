//! `kiln stage`: layers of a model for a leader on another host.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use kiln_engine::executor::StageHost;
use kiln_llm::Opening;
use kiln_stage::Stage;

use crate::model::{ModelFlags, resolve};
use crate::output::{log_with_time, print, say};
use crate::stage_flags::in_flags;

/// Flags of `kiln stage`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln stage model.gguf                        # for a leader on this host
  kiln serve model.gguf --stage 127.0.0.1:9100 # the leader

The leader says which layers the stage has. Both need copies of the same file. Between machines, --listen names an address of the network, and both sides take --stage-cert, --stage-key and --stage-ca.")]
pub(crate) struct Arguments {
    /// GGUF file or name as `kiln pull` takes them: the same model as the leader's
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Address to listen on; other than this machine's own only with certificates
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9100")]
    listen: String,
    /// Print a line of JSON when a leader may connect: the address and the model's file
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    log_with_time();
    let Arguments { model, listen, json, flags } = arguments;
    if flags.stages.is_leader() {
        bail!("a stage has no stages of its own\nhint: name all of them to the leader, in the order of the layers");
    }
    if flags.ctx_size.is_some() {
        log::warn!("--ctx-size: the leader says how many tokens the caches hold");
    }
    let path = resolve(Some(model))?;
    let opened = flags.open(&path)?;
    let opening = flags.opening()?;
    let make = move |reproducible: bool| {
        let opening = Opening { reproducible, ..opening.clone() };
        opening.executor().map_err(|why| kiln_engine::Error::Run { why: why.to_string() })
    };
    let host = StageHost::new(opened, Box::new(make))?;
    let about = host.about();
    let stage = Stage::listen(listen, flags.stages.keys()?, host).map_err(in_flags)?;
    let address = stage.address();
    if *json {
        print(&serde_json::json!({"address": address.to_string(), "model": path}).to_string());
    }
    say(&format!("a stage on {}, listening on {address}; Ctrl-C ends it", about.name));
    stage.wait();
    Ok(ExitCode::SUCCESS)
}
