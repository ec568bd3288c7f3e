//! Ollama's registry: a manifest names blobs by their SHA-256. Kept in the layout that Ollama itself uses, in a folder of the store;
//! what Ollama has fetched on this machine is used where it lies.

use std::fs;
use std::path::{Path, PathBuf};

use kiln_system::files::{Output, Overwrite};
use serde::Deserialize;

use crate::digest::Digest;
use crate::download::{Downloader, Remote};
use crate::error::{Error, Result};
use crate::http::{Client, Request, host};
use crate::place::prune;
use crate::record::{Expected, Kept};
use crate::settings::Settings;

const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const MODEL: &str = "application/vnd.ollama.image.model";
const ADAPTER: &str = "application/vnd.ollama.image.adapter";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    layers: Vec<Layer>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    media_type: String,
    digest: String,
    size: u64,
}

/// The model of a manifest: its hash and its length.
fn model(text: &str) -> Result<(Digest, u64), String> {
    let manifest: Manifest = serde_json::from_str(text).map_err(|why| why.to_string())?;
    if manifest.layers.iter().any(|layer| layer.media_type == ADAPTER) {
        return Err("the model has an adapter in a file of its own, which is not supported".into());
    }
    let mut models = manifest.layers.iter().filter(|layer| layer.media_type == MODEL);
    match (models.next(), models.next()) {
        (Some(layer), None) => {
            let digest = layer.digest.strip_prefix("sha256:").and_then(Digest::parse);
            Ok((digest.ok_or("its model has no SHA-256")?, layer.size))
        }
        (None, _) => Err("there is no model in it".into()),
        (Some(_), Some(_)) => Err("there are several models in it".into()),
    }
}

/// A model of the registry.
pub(crate) struct Tagged<'a> {
    pub(crate) settings: &'a Settings,
    /// `library/name`
    pub(crate) repo: &'a str,
    pub(crate) tag: &'a str,
}

impl Tagged<'_> {
    fn manifest(&self, root: &Path) -> PathBuf {
        // Ollama names the folder by the host, without the port of a test.
        root.join("manifests/registry.ollama.ai").join(self.repo).join(self.tag)
    }

    fn blob(root: &Path, digest: &Digest) -> PathBuf {
        root.join("blobs").join(format!("sha256-{digest}"))
    }

    /// A model that Ollama or Kiln has fetched already.
    pub(crate) fn cached(&self) -> Option<Vec<Kept>> {
        let own = self.settings.folder.join("ollama");
        let roots = [Some(own.as_path()), self.settings.ollama_models.as_deref()];
        roots.into_iter().flatten().find_map(|root| {
            let (digest, bytes) = model(&fs::read_to_string(self.manifest(root)).ok()?).ok()?;
            let path = Tagged::blob(root, &digest);
            let whole = fs::metadata(&path).is_ok_and(|there| there.len() == bytes);
            whole.then(|| vec![Kept { path, bytes, sha256: Some(digest), own: root == own }])
        })
    }

    /// Removes the manifest of the store: the model is gone.
    pub(crate) fn forget(&self) {
        let _ = fs::remove_file(self.manifest(&self.settings.folder.join("ollama")));
    }

    /// Fetches a model into the store.
    pub(crate) fn fetch(&self, client: &Client, down: &Downloader<'_>, expected: &Expected<'_>) -> Result<Vec<Kept>> {
        let (registry, repo, tag) = (&self.settings.ollama_registry, self.repo, self.tag);
        let url = format!("{registry}/v2/{repo}/manifests/{tag}");
        let refused = |why: Error| match why {
            Error::Status { status: 401 | 403 | 404, .. } => Error::Refused {
                what: format!("{} has no {repo}:{tag}, or does not show it", host(registry)),
                hint: "its site lists the models and their tags".into(),
            },
            why => why,
        };
        let text = client.text(&Request { accept: Some(MANIFEST), ..Request::new(&url) }).map_err(refused)?;
        let (digest, bytes) = model(&text).map_err(|why| Error::Nonsense { host: host(registry), why })?;
        expected.check(&format!("{repo}:{tag}"), &digest)?;
        let root = self.settings.folder.join("ollama");
        let path = Tagged::blob(&root, &digest);
        let remote = Remote {
            name: format!("{}:{tag}", repo.rsplit('/').next().unwrap_or(repo)),
            url: format!("{registry}/v2/{repo}/blobs/sha256:{digest}"),
            token: None,
            bytes: Some(bytes),
            sha256: Some(digest.clone()),
            recorded: None,
            variable: "KILN_MODELS",
        };
        down.fetch(&remote, &path).map_err(|why| {
            prune(path.parent().unwrap_or(&root), &self.settings.folder);
            refused(why)
        })?;
        let manifest = self.manifest(&root);
        let parent = manifest.parent().unwrap_or(&root);
        fs::create_dir_all(parent).map_err(Error::io(parent))?;
        // Behind the blob: a manifest says that all of it is there.
        Output::write(&manifest, Overwrite::Yes, text.as_bytes())?;
        Ok(vec![Kept { path, bytes, sha256: Some(digest), own: true }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_names_one_model_by_its_hash() {
        let layer = |ty: &str, digest: &str| format!(r#"{{"mediaType":"{ty}","digest":"{digest}","size":7}}"#);
        let digest = Digest::of(b"a model");
        let good = layer(MODEL, &format!("sha256:{digest}"));
        let of = |layers: &[&str]| model(&format!(r#"{{"schemaVersion":2,"layers":[{}]}}"#, layers.join(",")));
        assert_eq!(of(&[&layer("application/vnd.ollama.image.license", "sha256:x"), &good]).unwrap(), (digest, 7));
        for bad in [
            vec![],
            vec![good.as_str(), &good],
            vec![&good, &layer(ADAPTER, "sha256:0")],
            vec![&layer(MODEL, "sha256:../../../x")],
            vec![&layer(MODEL, "md5:x")],
        ] {
            of(&bad).unwrap_err();
        }
        model("<html>").unwrap_err();
    }
}
