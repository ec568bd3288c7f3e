//! `kiln update --check`: whether there is a newer release than this program. Kiln asks nobody by itself, and replaces nothing: whatever
//! installed it does that.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use kiln_system::text::shown;
use serde_json::json;

use crate::output::print;

/// Flags of `kiln update`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  kiln update --check --from https://example.org/kiln

ADDRESS is what `install.sh` takes: a folder, or an address that holds SHA256SUMS and the archives of a release. It may also be the \
page of the wheel at an index of Python packages, which ends in /kiln-llm/. Pre-releases are passed over. There is no address of \
Kiln's own yet, and nothing is asked unless this command is given.")]
pub(crate) struct Arguments {
    /// Say whether there is a newer release; nothing is changed
    #[arg(long)]
    check: bool,
    /// Where releases are
    #[arg(long, value_name = "ADDRESS", env = "KILN_UPDATES")]
    from: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if !arguments.check {
        bail!(
            "Kiln does not replace itself\n\
             hint: `kiln update --check` says whether there is a newer release; install it the way this one was installed"
        );
    }
    let Some(from) = &arguments.from else {
        bail!(
            "no address of releases is known: Kiln is published at none yet\n\
             hint: --from ADDRESS, or KILN_UPDATES: the folder or the address that it was installed from"
        );
    };
    let list = releases(from)?;
    let latest = latest(&list).with_context(|| {
        format!(
            "{} names no release of Kiln\nhint: it must hold files such as kiln-1.2.3-x86_64-linux.tar.xz",
            shown(from)
        )
    })?;
    let own = env!("CARGO_PKG_VERSION");
    let is_newer = latest > Version::parse(own).context("the program's own version is none")?;
    if arguments.json {
        let told = json!({"current": own, "latest": latest.to_string(), "newer": is_newer, "from": from});
        print(&serde_json::to_string_pretty(&told)?);
        return Ok(ExitCode::SUCCESS);
    }
    print(&match is_newer {
        true => format!("Kiln {latest} is there, this is {own}. Install it the way this one was installed."),
        false => format!("Kiln {own} is the newest release there."),
    });
    Ok(ExitCode::SUCCESS)
}

/// A text in which the files of releases are named.
fn releases(from: &str) -> anyhow::Result<String> {
    let is_loopback = ["http://127.0.0.1", "http://localhost", "http://[::1]"]
        .iter()
        .any(|start| from.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '/'])));
    if from.starts_with("http://") && !is_loopback {
        bail!("{} is not encrypted\nhint: use https://", shown(from));
    }
    let bare = from.trim_end_matches('/');
    if !from.starts_with("https://") && !from.starts_with("http://") {
        let file = Path::new(from).join("SHA256SUMS");
        return std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()));
    }
    let page = match bare.ends_with("/kiln-llm") {
        true => format!("{bare}/"),
        false => format!("{bare}/SHA256SUMS"),
    };
    Ok(kiln_store::text_at(&page)?)
}

/// The version of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    numbers: [u64; 3],
    /// A pre-release comes before what it leads to.
    is_final: bool,
}

impl Version {
    fn parse(text: &str) -> Option<Version> {
        let (numbers, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()));
        let parts: Vec<u64> = numbers.split('.').map(|part| part.parse().ok()).collect::<Option<_>>()?;
        Some(Version { numbers: parts.try_into().ok()?, is_final: rest.is_empty() })
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [major, minor, patch] = self.numbers;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// The newest release of which an archive or a wheel is named.
fn latest(list: &str) -> Option<Version> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '+');
    let versions = list.split(|c: char| !is_name(c)).filter_map(|name| {
        let archive = || name.strip_prefix("kiln-")?.strip_suffix("-linux.tar.xz")?.rsplit_once('-');
        let wheel = || name.strip_prefix("kiln_llm-")?.strip_suffix(".whl")?.split_once('-');
        let (version, _) = archive().or_else(wheel)?;
        Version::parse(version)
    });
    versions.filter(|version| version.is_final).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_release_is_found_in_sums_and_on_pages() {
        let found = |list: &str| latest(list).map(|version| version.to_string());
        let sums =
            "00  kiln-0.9.0-x86_64-linux.tar.xz\n00  kiln-0.10.1-aarch64-linux.tar.xz\n00  kiln_0.11.0_amd64.deb\n";
        assert_eq!(found(sums).as_deref(), Some("0.10.1"));
        let page = "<a href=\"../../f/kiln_llm-1.2.3-py3-none-manylinux_2_34_x86_64.whl#sha256=0\">kiln_llm-1.2.3-py3-none-\
                    manylinux_2_34_x86_64.whl</a> kiln_llm-1.3.0rc1-py3-none-any.whl kiln_llm_python-9.0.0-cp39-abi3-any.whl";
        assert_eq!(found(page).as_deref(), Some("1.2.3"));
        for nothing in ["", "<html>kiln</html>", "kiln-1.0.0-rc.1-x86_64-linux.tar.xz", "kiln-1.0-x86_64-linux.tar.xz"]
        {
            assert_eq!(found(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn a_release_is_newer_than_its_pre_release() {
        let [old, pre, new] = ["0.9.9", "1.0.0-rc.1", "1.0.0"].map(|text| Version::parse(text).unwrap());
        assert!(old < pre && pre < new);
    }

    #[test]
    fn only_encrypted_addresses_are_asked() {
        for from in ["http://example.org/kiln", "http://127.0.0.1.example.org"] {
            assert!(releases(from).unwrap_err().to_string().contains("not encrypted"), "{from}");
        }
    }
}
