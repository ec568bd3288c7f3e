//! From what `kiln doctor` saw to what is wrong and how to put it right. Plain data in, plain data out.

use kiln_system::memory::size;
use kiln_system::text::shown;
use serde::Serialize;

use super::machine::Machine;

/// One thing that is wrong, and the commands that help.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub(super) problem: String,
    pub(super) fixes: Vec<String>,
}

pub(super) fn finding(problem: impl Into<String>, fixes: &[&str]) -> Finding {
    Finding { problem: problem.into(), fixes: fixes.iter().map(|&fix| fix.to_owned()).collect() }
}

/// Everything wrong with the machine, what stops most first.
pub(super) fn findings(m: &Machine) -> Vec<Finding> {
    let mut all = Vec::new();
    all.extend(loader(m));
    all.extend(manifests(m));
    all.extend(nvidia(m));
    all.extend(mesa(m));
    all.extend(nodes(m));
    all.extend(devices(m));
    if let Err(e) = &m.cache {
        let fixes = ["export KILN_CACHE_DIR=/path/to/a/writable/folder"];
        all.push(finding(format!("kernels are compiled anew each start: {e}"), &fixes));
    }
    all.extend(leftovers(m));
    all
}

/// Files that a killed process could not remove.
fn leftovers(m: &Machine) -> Option<Finding> {
    let bytes: u64 = m.leftovers.iter().map(|(_, bytes)| bytes).sum();
    if m.leftovers.is_empty() {
        return None;
    }
    let problem = format!("{} incomplete files ({}) are left of runs that were killed", m.leftovers.len(), size(bytes));
    let remove = |(path, _): &(std::path::PathBuf, u64)| format!("rm -r '{}'", shown(&path.to_string_lossy()));
    Some(Finding { problem, fixes: m.leftovers.iter().take(16).map(remove).collect() })
}

fn loader(m: &Machine) -> Option<Finding> {
    let error = m.loader.as_ref().err()?;
    Some(finding(
        format!("the Vulkan loader is missing ({error})"),
        &[
            "Debian, Ubuntu: sudo apt install libvulkan1",
            "Fedora: sudo dnf install vulkan-loader",
            "Arch: sudo pacman -S vulkan-icd-loader",
        ],
    ))
}

/// Manifests that name a library which does not load.
fn manifests(m: &Machine) -> Vec<Finding> {
    let mut all = Vec::new();
    for manifest in &m.manifests {
        let Err(error) = &manifest.library else { continue };
        let problem = format!("the driver of {} is not usable: {error}", manifest.path.display());
        let fix: &[&str] = if error.contains("GLIBC_") {
            &["the driver wants a newer C library than this system has: use a newer distribution or container image"]
        } else if error.contains("GLIBCXX_") {
            &["the driver wants a newer C++ library: sudo apt install --only-upgrade libstdc++6, or a newer image"]
        } else if error.contains("ELF class") || error.contains("invalid ELF") {
            &["the library is for another kind of processor: install the driver package for this one"]
        } else if error.starts_with("cannot be read") && m.nvidia.overridden {
            &["unset VK_DRIVER_FILES VK_ICD_FILENAMES VK_ADD_DRIVER_FILES", "or name files that exist"]
        } else if error.contains("No such file") || error.contains("cannot open shared object") {
            &["install the library named above, or reinstall the driver package that owns the manifest"]
        } else {
            &["reinstall the driver package that owns the manifest"]
        };
        all.push(finding(problem, fix));
    }
    if m.nvidia.overridden && m.manifests.is_empty() {
        let fixes = ["unset VK_DRIVER_FILES VK_ICD_FILENAMES VK_ADD_DRIVER_FILES"];
        all.push(finding("an environment variable hides every driver from the loader", &fixes));
    }
    all
}

fn nvidia(m: &Machine) -> Option<Finding> {
    let card = m.cards.iter().any(|c| c.vendor == "NVIDIA");
    let node = m.nodes.iter().any(|n| n.path.to_string_lossy().starts_with("/dev/nvidia"));
    let container = "docker run --runtime=nvidia --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all ...";
    if card && !node {
        let host =
            "on the host: install the driver (sudo apt install nvidia-driver) and load it (sudo modprobe nvidia)";
        let problem = "there is an NVIDIA card but no /dev/nvidia* node";
        return Some(finding(problem, &[host, &format!("in a container: {container}")]));
    }
    let error = m.nvidia.loads.as_ref().err().filter(|_| node)?;
    let problem = format!("there is an NVIDIA device node, but {} does not load: {error}", m.nvidia.library);
    if error.contains(&format!("{}: cannot open", m.nvidia.library)) {
        let host = "on the host: install the driver's user-space libraries (libnvidia-gl of the driver's version)";
        return Some(finding(problem, &[&format!("in a container: {container}"), host]));
    }
    Some(finding(problem, &["sudo apt install libegl1 libxext6 libx11-6 libxcb1"]))
}

/// AMD and Intel cards, whose drivers come with Mesa.
fn mesa(m: &Machine) -> Option<Finding> {
    let card = m.cards.iter().find(|c| c.vendor != "NVIDIA" && c.driver.is_some())?;
    let render = m.nodes.iter().any(|n| n.path.to_string_lossy().contains("/dri/"));
    if !render {
        let fixes =
            ["in a container: docker run --device /dev/dri ...", "on the host: sudo modprobe amdgpu (or i915, xe)"];
        return Some(finding(format!("there is an {} card but no /dev/dri/renderD* node", card.vendor), &fixes));
    }
    let named = |words: &[&str]| {
        m.manifests.iter().any(|f| words.iter().any(|w| f.path.to_string_lossy().to_lowercase().contains(w)))
    };
    let driver = match card.vendor {
        "AMD" => named(&["radeon", "amd"]),
        _ => named(&["intel"]),
    };
    if driver {
        return None;
    }
    Some(finding(
        format!("there is an {} card but no Vulkan driver for it", card.vendor),
        &[
            "Debian, Ubuntu: sudo apt install mesa-vulkan-drivers",
            "Fedora: sudo dnf install mesa-vulkan-drivers",
            "Arch: sudo pacman -S vulkan-radeon (or vulkan-intel)",
        ],
    ))
}

fn nodes(m: &Machine) -> Vec<Finding> {
    let closed = m.nodes.iter().filter_map(|node| Some((node, node.access.as_ref().err()?)));
    let denied = closed.filter(|(_, error)| error.contains("ermission"));
    denied
        .map(|(node, error)| {
            let (path, group) = (node.path.display(), &node.group);
            let member = m.groups.contains(group);
            let host = format!("sudo usermod -aG {group} $USER   (then log in again)");
            let container = format!("in a container: docker run --group-add $(stat -c %g {path}) ...");
            let owner = format!("sudo chmod g+rw {path}");
            let fixes: &[&str] = if member { &[&owner] } else { &[&host, &container] };
            finding(format!("{path} cannot be opened by this user: {error}"), fixes)
        })
        .collect()
}

fn devices(m: &Machine) -> Vec<Finding> {
    let mut all = Vec::new();
    let Ok(found) = &m.adapters else {
        if let (Ok(_), Err(e)) = (&m.loader, &m.adapters) {
            let fixes = ["see the problems above", "unset KILN_VALIDATION, if it is set"];
            all.push(finding(format!("Vulkan does not start: {}", e.lines().next().unwrap_or_default()), &fixes));
        }
        return all;
    };
    for device in found {
        if let Some(missing) = &device.missing {
            let fixes = ["install a newer driver; if there is none, this device cannot run Kiln"];
            all.push(finding(format!("{} lacks {missing}", device.description), &fixes));
        }
    }
    if !found.is_empty() && found.iter().all(|d| d.is_cpu) && m.usable.is_err() {
        let index = found[0].index.to_string();
        let fixes =
            [&*format!("to use it all the same: kiln ... --device {index}"), "without any device Kiln runs on the CPU"];
        all.push(finding("the only Vulkan device is a software one, which is slow and taken only when named", &fixes));
    }
    if let (Err(e), false) = (&m.usable, found.is_empty())
        && !found.iter().all(|d| d.is_cpu)
    {
        let mut lines = e.lines();
        let problem = lines.next().unwrap_or_default().to_owned();
        let hint = lines.next().and_then(|l| l.strip_prefix("hint: ")).unwrap_or("kiln devices lists what there is");
        all.push(finding(problem, &[hint]));
    }
    if found.is_empty() && all.is_empty() && m.loader.is_ok() && m.cards.is_empty() && m.nodes.is_empty() {
        let fixes = ["in a container: pass the GPU in (--device /dev/dri for AMD and Intel, --gpus all for NVIDIA)"];
        all.push(finding("this machine shows no GPU at all", &fixes));
    }
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use super::super::machine::{Card, Found, Manifest, Node, Nvidia};
    use super::*;

    fn healthy() -> Machine {
        Machine {
            loader_library: "libvulkan.so.1",
            loader: Ok("1.4.309".into()),
            overrides: BTreeMap::new(),
            folders: Vec::new(),
            manifests: vec![Manifest {
                path: "/usr/share/vulkan/icd.d/radeon_icd.json".into(),
                library: Ok("x".into()),
            }],
            nvidia: Nvidia {
                library: "libE.so.0",
                loads: Err("libE.so.0: cannot open".into()),
                has_manifest: false,
                overridden: false,
            },
            nodes: vec![Node { path: "/dev/dri/renderD128".into(), group: "render".into(), access: Ok(()) }],
            uid: 1000,
            groups: vec!["render".into()],
            cards: vec![Card { address: "0000:03:00.0".into(), vendor: "AMD", driver: Some("amdgpu".into()) }],
            glibc: Some("2.41".into()),
            in_container: false,
            cache: Ok(PathBuf::new()),
            leftovers: Vec::new(),
            adapters: Ok(vec![Found { index: 0, description: "Card".into(), is_cpu: false, missing: None }]),
            usable: Ok("Card".into()),
        }
    }

    /// The one finding of this machine: its problem and all its fixes.
    fn only(m: &Machine) -> String {
        let all = findings(m);
        assert_eq!(all.len(), 1, "{all:?}");
        format!("{} | {}", all[0].problem, all[0].fixes.join(" | "))
    }

    #[test]
    fn a_healthy_machine_has_no_findings() {
        assert!(findings(&healthy()).is_empty(), "{:?}", findings(&healthy()));
    }

    #[test]
    fn each_fault_names_its_fix() {
        let mut m = healthy();
        m.loader = Err("libvulkan.so.1: cannot open".into());
        m.adapters = Err("no Vulkan loader".into());
        assert!(only(&m).contains("apt install libvulkan1"));

        let mut m = healthy();
        m.manifests[0].library = Err("/x/y.so does not load: version `GLIBC_2.38' not found".into());
        assert!(only(&m).contains("newer C library"));

        let mut m = healthy();
        m.nodes[0].access = Err("Permission denied (os error 13)".into());
        m.groups.clear();
        assert!(only(&m).contains("usermod -aG render $USER"), "{}", only(&m));

        let mut m = healthy();
        m.manifests.clear();
        assert!(only(&m).contains("mesa-vulkan-drivers"));

        let mut m = healthy();
        m.nodes.push(Node { path: "/dev/nvidia0".into(), group: "root".into(), access: Ok(()) });
        assert!(only(&m).contains("--runtime=nvidia --gpus all"));
        m.nvidia.loads = Err("libX11.so.6: cannot open shared object file".into());
        assert!(only(&m).contains("libx11-6"), "{}", only(&m));

        let mut m = healthy();
        m.cards[0] = Card { address: String::new(), vendor: "NVIDIA", driver: None };
        assert!(only(&m).contains("modprobe nvidia"));

        let mut m = healthy();
        m.leftovers = vec![("/models/.kiln-x.tmp".into(), 3 << 20)];
        assert!(only(&m).contains("3.0 MiB") && only(&m).contains("rm -r '/models/.kiln-x.tmp'"), "{}", only(&m));

        let mut m = healthy();
        m.cache = Err("/nowhere cannot be written".into());
        assert!(only(&m).contains("KILN_CACHE_DIR"));
    }

    #[test]
    fn devices_that_do_not_serve_are_explained() {
        let mut m = healthy();
        m.usable = Err("no Vulkan device found\nhint: x".into());
        m.adapters = Ok(vec![Found { index: 0, description: "llvmpipe".into(), is_cpu: true, missing: None }]);
        assert!(only(&m).contains("--device 0"));
        m = healthy();
        m.usable = Err("no device matches \"9\"\nhint: look here".into());
        assert!(only(&m).contains("look here"));
        m = healthy();
        m.adapters = Ok(vec![Found {
            index: 0,
            description: "Old".into(),
            is_cpu: false,
            missing: Some("16-bit storage".into()),
        }]);
        assert!(only(&m).contains("Old lacks 16-bit storage"));
    }
}
