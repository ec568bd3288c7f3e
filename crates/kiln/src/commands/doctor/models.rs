//! What `kiln doctor` says of models: the store, downloads that broke off, and whether there is memory for a given model.

use std::path::{Path, PathBuf};

use kiln_engine::run::fit;
use kiln_gguf::TensorType;
use kiln_system::files::Workspace;
use serde::Serialize;

use super::findings::{Finding, finding};
use crate::device::DeviceFlag;
use crate::lora::LoraFlags;
use crate::model::{ModelFlags, open, resolve};
use crate::output::{print, size};
use crate::placing::PlaceFlags;
use crate::store::store;

/// The store, looked at.
#[derive(Debug, Serialize)]
pub(super) struct Models {
    folder: Result<PathBuf, String>,
    count: usize,
    bytes: u64,
    /// Sources of models whose files are gone or have another length.
    damaged: Vec<String>,
    /// Names of files that broke off, with what is there and what belongs there.
    incomplete: Vec<(String, u64, u64)>,
    /// The model that was asked about.
    asked: Option<Result<Asked, String>>,
}

/// What a model needs.
#[derive(Debug, Serialize)]
pub(super) struct Asked {
    path: PathBuf,
    device: String,
    bytes: u64,
    free: Option<u64>,
    context: usize,
}

impl Models {
    /// Looks at the store, and at a model where one is named.
    pub(super) fn examine(model: Option<&Path>, device: &DeviceFlag) -> Models {
        let found = store();
        let (all, parts) = found.as_ref().map(|store| (store.list(), store.incomplete())).unwrap_or_default();
        let broken = |record: &&kiln_store::Record| !record.is_there();
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Models {
            folder: found.map_err(|why| why.to_string()).and_then(|store| writable(&store.settings().folder)),
            count: all.len(),
            bytes: all.iter().map(kiln_store::Record::bytes).sum(),
            damaged: all.iter().filter(broken).map(|record| record.source.clone()).collect(),
            incomplete: parts.iter().map(|part| (name(&part.path), part.done, part.total)).collect(),
            asked: model.map(|model| asked(model, device).map_err(|why| format!("{why:#}"))),
        }
    }

    pub(super) fn describe(&self) {
        match &self.folder {
            Ok(folder) => {
                print(&format!("store       {}, {} models, {}", folder.display(), self.count, size(self.bytes)))
            }
            Err(why) => print(&format!("store       {why}")),
        }
        if let Some(Ok(asked)) = &self.asked {
            let Asked { path, device, bytes, free, context } = asked;
            let of = free.map(|free| format!(" of {} free", size(free))).unwrap_or_default();
            print(&format!("model       {}", path.display()));
            print(&format!("            {}{of} on {device}, for a text of {context} tokens", size(*bytes)));
        }
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut all = Vec::new();
        if let Err(why) = &self.folder {
            all.push(finding(
                format!("no model can be fetched: {why}"),
                &["export KILN_MODELS=/path/to/a/writable/folder"],
            ));
        }
        for source in &self.damaged {
            let fixes = [format!("kiln rm '{source}'"), format!("kiln pull '{source}'")];
            all.push(Finding { problem: format!("files of {source} are gone or cut short"), fixes: fixes.into() });
        }
        for (name, done, total) in &self.incomplete {
            let problem = format!("the download of {name} broke off at {} of {}", size(*done), size(*total));
            all.push(finding(problem, &["pull the model again to go on", "kiln rm --incomplete"]));
        }
        if let Some(Err(why)) = &self.asked {
            all.push(finding(why.clone(), &[]));
        }
        all
    }

    /// Whether the model that was asked about can run.
    pub(super) fn is_well(&self) -> bool {
        !matches!(self.asked, Some(Err(_)))
    }
}

/// The folder, tried by writing into it if it is there.
fn writable(folder: &Path) -> Result<PathBuf, String> {
    let place = folder.ancestors().find(|place| place.exists()).unwrap_or(folder);
    Workspace::in_folder(place).map_err(|why| format!("{} cannot be written: {why}", folder.display()))?;
    Ok(folder.to_owned())
}

fn asked(model: &Path, device: &DeviceFlag) -> anyhow::Result<Asked> {
    let path = resolve(Some(model))?;
    let model = open(&path)?;
    let (device, f16) = (device.clone(), TensorType::F16);
    let flags = ModelFlags {
        device,
        cpu: false,
        threads: None,
        ctx_size: None,
        cache_type_k: f16,
        cache_type_v: f16,
        reproducible: false,
        lora: LoraFlags::default(),
        stages: Default::default(),
        place: PlaceFlags::default(),
        keys: Default::default(),
        early: kiln_llm::Early::default(),
    };
    let executor = flags.executor_for(&model, &flags.wish(1))?;
    let fit = fit(&model, &*executor, &flags.wish(1))?;
    let free = fit.memory().map(|memory| memory.free);
    Ok(Asked { path, device: executor.describe(), bytes: fit.bytes(), free, context: fit.room.context })
}
