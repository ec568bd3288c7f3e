//! The npm packages: `kiln-llm` with a small script, and one package for each system with the binary, of which npm takes the fitting one.

use serde_json::json;

use crate::archive::{Entry, Files, below, gzip, tar};
use crate::machine::Machine;
use crate::project::Project;

/// The script that starts the binary.
const SHIM: &str = include_str!("kiln.js");

/// The packages: names of their files, and the files.
pub(crate) fn packages(
    project: &Project,
    binary: &[u8],
    licences: &Files,
    level: u32,
) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let version = &project.version;
    let readme = Entry::plain(project.file("README.md")?);
    let machine = project.machine;
    let optional: serde_json::Map<String, serde_json::Value> =
        Machine::ALL.iter().map(|machine| (format!("@kiln-llm/linux-{}", machine.node()), json!(version))).collect();
    // A script of our own: the licences of what is linked into a machine's binary come with that one, and the package is the same for all.
    let mut main = licences.clone();
    main.remove("THIRD-PARTY-LICENSES");
    let about = json!({
        "name": "kiln-llm",
        "version": version,
        "description": project.description,
        "license": project.licence,
        "bin": {"kiln": "bin/kiln.js"},
        "files": ["bin/kiln.js"],
        "engines": {"node": ">=16"},
        "optionalDependencies": optional,
    });
    main.insert("package.json".into(), Entry::plain(pretty(&about)?));
    main.insert("bin/kiln.js".into(), Entry::program(SHIM));
    main.insert("README.md".into(), readme);
    let mut linux = licences.clone();
    let about = json!({
        "name": format!("@kiln-llm/linux-{}", machine.node()),
        "version": version,
        "description": format!("The binary of kiln-llm for Linux on {} (not Kiln AI)", machine.words()),
        "license": project.licence,
        "files": ["bin/kiln"],
        "os": ["linux"],
        "cpu": [machine.node()],
        "libc": ["glibc"],
    });
    linux.insert("package.json".into(), Entry::plain(pretty(&about)?));
    linux.insert("bin/kiln".into(), Entry::program(binary));
    let pack = |files: &Files| gzip(&tar(&below("package", files), "", false, project.time)?, level);
    Ok(vec![
        (format!("kiln-llm-{version}.tgz"), pack(&main)?),
        (format!("kiln-llm-linux-{}-{version}.tgz", machine.node()), pack(&linux)?),
    ])
}

fn pretty(value: &serde_json::Value) -> anyhow::Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}
