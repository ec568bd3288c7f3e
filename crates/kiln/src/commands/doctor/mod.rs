//! `kiln doctor`: what stands between this machine and a usable GPU, what is wrong with the store of models, and the exact fix.
//! Works without any Vulkan.

mod findings;
mod machine;
mod models;

use std::path::PathBuf;
use std::process::ExitCode;

use findings::{Finding, findings};
use machine::{Machine, Node};
use models::Models;
use serde_json::json;

use crate::device::DeviceFlag;
use crate::output::print;

/// Flags of `kiln doctor`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln doctor
  kiln doctor smollm2         # is there memory for it?

Exit code 0 when a GPU (or the device named) is usable and the model, if one is named, fits; 1 otherwise.")]
pub(crate) struct Arguments {
    /// GGUF file or a name, as `kiln pull` takes them: whether there is memory for it
    model: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceFlag,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let machine = Machine::examine(&arguments.device);
    let models = Models::examine(arguments.model.as_deref(), &arguments.device);
    let mut findings = findings(&machine);
    findings.extend(models.findings());
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({
            "usable": machine.usable.is_ok(),
            "machine": machine,
            "models": models,
            "findings": findings,
        }))?);
    } else {
        describe(&machine);
        models.describe();
        conclude(&machine, &findings);
    }
    Ok(if machine.usable.is_ok() && models.is_well() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn describe(m: &Machine) {
    match &m.loader {
        Ok(version) => print(&format!("loader      {} offers Vulkan {version}", m.loader_library)),
        Err(e) => print(&format!("loader      missing: {e}")),
    }
    for (name, value) in &m.overrides {
        print(&format!("override    {name}={value}"));
    }
    if m.manifests.is_empty() {
        print("manifests   none found in");
        m.folders.iter().for_each(|f| print(&format!("            {}", f.display())));
    }
    for manifest in &m.manifests {
        print(&format!("manifest    {}", manifest.path.display()));
        match &manifest.library {
            Ok(library) => print(&format!("            {library}: loads")),
            Err(e) => print(&format!("            {e}")),
        }
    }
    print(&format!("nvidia      {}", m.nvidia.describe()));
    if m.nodes.is_empty() {
        print("nodes       none (/dev/dri/renderD*, /dev/nvidia*)");
    }
    for node in &m.nodes {
        print(&format!("node        {} ({})", node.path.display(), rights(node)));
    }
    print(&format!("user        uid {}, groups {}", m.uid, m.groups.join(" ")));
    for card in &m.cards {
        print(&format!(
            "pci         {} {} ({})",
            card.address,
            card.vendor,
            card.driver.as_deref().unwrap_or("no driver")
        ));
    }
    print(&format!("glibc       {}", m.glibc.as_deref().unwrap_or("not found (another C library)")));
    match &m.cache {
        Ok(folder) => print(&format!("cache       {} is writable", folder.display())),
        Err(e) => print(&format!("cache       {e}")),
    }
    match &m.adapters {
        Ok(adapters) if adapters.is_empty() => print("devices     none"),
        Ok(adapters) => {
            for a in adapters {
                let state = a.missing.as_ref().map_or("complete".to_owned(), |what| format!("lacks {what}"));
                print(&format!("device      {}: {} ({state})", a.index, a.description));
            }
        }
        Err(e) => print(&format!("devices     {}", first_line(e))),
    }
}

fn rights(node: &Node) -> String {
    match &node.access {
        Ok(()) => "readable and writable".to_owned(),
        Err(e) => format!("{e}; group {}", node.group),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn conclude(m: &Machine, findings: &[Finding]) {
    print("");
    for finding in findings {
        print(&format!("problem: {}", finding.problem));
        finding.fixes.iter().for_each(|fix| print(&format!("    fix: {fix}")));
    }
    match &m.usable {
        Ok(name) => print(&format!("usable: {name}")),
        Err(e) => print(&format!("no usable GPU: {}", first_line(e))),
    }
}
