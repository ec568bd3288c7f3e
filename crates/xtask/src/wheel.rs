//! The Python wheel: a zip file whose one program pip puts beside `python`. There is no module in it.

use std::io::{Cursor, Write as _};

use sha2::{Digest as _, Sha256};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

use crate::archive::{Entry, Files};
use crate::project::Project;

const NAME: &str = "kiln_llm";

/// The version as Python writes it (PEP 440): `1.0.0-rc.1` is `1.0.0rc1`.
pub(crate) fn python_version(version: &str) -> String {
    match version.split_once('-') {
        Some((release, kind)) => {
            format!("{release}{}", kind.replace("alpha", "a").replace("beta", "b").replace('.', ""))
        }
        None => version.to_owned(),
    }
}

/// The name of the wheel's file.
pub(crate) fn file_name(project: &Project, tag: &str) -> String {
    format!("{NAME}-{}-py3-none-{tag}.whl", python_version(&project.version))
}

/// The wheel of the binary.
pub(crate) fn wheel(
    project: &Project,
    tag: &str,
    binary: &[u8],
    licences: &Files,
    level: u32,
) -> anyhow::Result<Vec<u8>> {
    let version = python_version(&project.version);
    let about = format!("{NAME}-{version}.dist-info");
    let names: String = licences.keys().map(|name| format!("License-File: {name}\n")).collect();
    let readme = String::from_utf8(project.file("README.md")?)?;
    let metadata = format!(
        "Metadata-Version: 2.4\nName: kiln-llm\nVersion: {version}\nSummary: {}\nLicense-Expression: {}\n{names}\
         Requires-Python: >=3.8\nDescription-Content-Type: text/markdown\n\n{readme}",
        project.description, project.licence,
    );
    let tags = format!(
        "Wheel-Version: 1.0\nGenerator: xtask {}\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n",
        project.version
    );
    let mut files = Files::from([
        (format!("{NAME}-{version}.data/scripts/kiln"), Entry::program(binary)),
        (format!("{about}/METADATA"), Entry::plain(metadata)),
        (format!("{about}/WHEEL"), Entry::plain(tags)),
    ]);
    files.extend(licences.iter().map(|(name, entry)| (format!("{about}/licenses/{name}"), entry.clone())));
    let record = format!("{about}/RECORD");
    let mut lines: String = files.iter().map(|(path, entry)| line(path, &entry.bytes)).collect();
    lines += &format!("{record},,\n");
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    // RECORD comes last, as the format recommends.
    let last = (record, Entry::plain(lines));
    for (path, entry) in files.iter().chain([(&last.0, &last.1)]) {
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            // Level 0 is another method here.
            .compression_level(Some(i64::from(level.max(1))))
            // The earliest time that zip files know; pip does not keep it.
            .last_modified_time(DateTime::default())
            .unix_permissions(entry.mode);
        zip.start_file(path.as_str(), options)?;
        zip.write_all(&entry.bytes)?;
    }
    Ok(zip.finish()?.into_inner())
}

/// A line of RECORD: path, checksum in URL-safe base64 without padding, length.
fn line(path: &str, bytes: &[u8]) -> String {
    format!("{path},sha256={},{}\n", base64url(&Sha256::digest(bytes)), bytes.len())
}

fn base64url(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let chunk = |three: &[u8]| {
        let number = (0..3).fold(0_usize, |number, at| number << 8 | usize::from(three.get(at).copied().unwrap_or(0)));
        (0..=three.len()).map(|at| char::from(LETTERS[number >> (18 - 6 * at) & 63])).collect::<String>()
    };
    bytes.chunks(3).map(chunk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard_without_padding() {
        let pairs = [("", ""), ("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foob", "Zm9vYg"), ("\u{3ff}?", "z78_")];
        for (plain, want) in pairs {
            assert_eq!(base64url(plain.as_bytes()), want);
        }
    }

    #[test]
    fn versions_are_those_of_python() {
        let pairs = [("0.1.0", "0.1.0"), ("1.0.0-rc.1", "1.0.0rc1"), ("1.0.0-alpha.2", "1.0.0a2")];
        for (ours, theirs) in pairs {
            assert_eq!(python_version(ours), theirs);
        }
    }
}
