//! Archives whose bytes depend on their entries alone: entries in order, one time, one owner.

use std::collections::BTreeMap;
use std::io::Write as _;

use flate2::{Compression, GzBuilder};
use lzma_rust2::{XzOptions, XzWriter};

/// A file of a package.
#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) mode: u32,
    pub(crate) bytes: Vec<u8>,
}

impl Entry {
    /// A file that everybody may read.
    pub(crate) fn plain(bytes: impl Into<Vec<u8>>) -> Self {
        Self { mode: 0o644, bytes: bytes.into() }
    }

    /// A program.
    pub(crate) fn program(bytes: impl Into<Vec<u8>>) -> Self {
        Self { mode: 0o755, bytes: bytes.into() }
    }
}

/// The files of a package by their paths, which are relative and have `/` between their parts.
pub(crate) type Files = BTreeMap<String, Entry>;

/// The same files below a folder.
pub(crate) fn below(folder: &str, files: &Files) -> Files {
    files.iter().map(|(path, entry)| (format!("{folder}/{path}"), entry.clone())).collect()
}

/// The folders above the files, each before those that lie in it.
pub(crate) fn folders(files: &Files) -> Vec<String> {
    let mut all: Vec<String> = files
        .keys()
        .flat_map(|path| path.match_indices('/').map(|(at, _)| path[..at].to_owned()).collect::<Vec<_>>())
        .collect();
    all.sort();
    all.dedup();
    all
}

/// A tar archive; `prefix` stands before every path (`./` in Debian packages). `time` is in seconds since 1970.
pub(crate) fn tar(files: &Files, prefix: &str, with_folders: bool, time: u64) -> anyhow::Result<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |path: String, kind, mode, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_mtime(time);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(bytes.len() as u64);
        header.set_username("root")?;
        header.set_groupname("root")?;
        // `append_data` would drop the leading `./`.
        let name = &mut header.as_old_mut().name;
        anyhow::ensure!(path.len() < name.len(), "{path} is too long a path for a tar archive");
        name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_cksum();
        builder.append(&header, bytes)?;
        anyhow::Ok(())
    };
    if with_folders {
        let top = Some(String::new()).filter(|_| !prefix.is_empty());
        for folder in top.into_iter().chain(folders(files).into_iter().map(|folder| folder + "/")) {
            add(format!("{prefix}{folder}"), tar::EntryType::Directory, 0o755, &[])?;
        }
    }
    for (path, entry) in files {
        add(format!("{prefix}{path}"), tar::EntryType::Regular, entry.mode, &entry.bytes)?;
    }
    Ok(builder.into_inner()?)
}

/// Compressed as `xz` does.
pub(crate) fn xz(bytes: &[u8], level: u32) -> anyhow::Result<Vec<u8>> {
    let mut writer = XzWriter::new(Vec::new(), XzOptions::with_preset(level))?;
    writer.write_all(bytes)?;
    Ok(writer.finish()?)
}

/// Compressed as `gzip -n` does: without a name and a time.
pub(crate) fn gzip(bytes: &[u8], level: u32) -> anyhow::Result<Vec<u8>> {
    // Byte 9 is the system; that of Unix on all of them.
    let mut writer = GzBuilder::new().mtime(0).operating_system(3).write(Vec::new(), Compression::new(level));
    writer.write_all(bytes)?;
    Ok(writer.finish()?)
}

/// An `ar` archive, the outer form of Debian packages.
pub(crate) fn ar(members: &[(&str, Vec<u8>)], time: u64) -> Vec<u8> {
    let mut archive = b"!<arch>\n".to_vec();
    for (name, bytes) in members {
        archive.extend(format!("{name:<16}{time:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, "100644", bytes.len()).bytes());
        archive.extend(bytes);
        // Members begin at even offsets.
        if bytes.len() % 2 == 1 {
            archive.push(b'\n');
        }
    }
    archive
}

/// A digest in hexadecimal digits.
pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_once_and_before_their_contents() {
        let files = Files::from([
            ("usr/bin/a".to_owned(), Entry::program("a")),
            ("usr/share/doc/b".to_owned(), Entry::plain("b")),
        ]);
        assert_eq!(folders(&files), ["usr", "usr/bin", "usr/share", "usr/share/doc"]);
        let bytes = tar(&files, "./", true, 1_000).unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let entries: Vec<_> = archive.entries().unwrap().map(|entry| entry.unwrap()).collect();
        let names: Vec<String> =
            entries.iter().map(|entry| String::from_utf8_lossy(&entry.path_bytes()).into_owned()).collect();
        let want =
            ["./", "./usr/", "./usr/bin/", "./usr/share/", "./usr/share/doc/", "./usr/bin/a", "./usr/share/doc/b"];
        assert_eq!(names, want);
        assert!(entries.iter().all(|entry| entry.header().mtime().unwrap() == 1_000));
        assert_eq!(entries[5].header().mode().unwrap(), 0o755);
    }

    #[test]
    fn a_path_that_does_not_fit_is_refused() {
        let files = Files::from([("x".repeat(100), Entry::plain(""))]);
        assert!(tar(&files, "", false, 0).unwrap_err().to_string().contains("too long"));
    }

    #[test]
    fn members_of_ar_begin_at_even_offsets() {
        let archive = ar(&[("a", b"x".to_vec()), ("b", b"yz".to_vec())], 7);
        assert_eq!(archive.len(), 8 + 60 + 2 + 60 + 2);
        assert_eq!(&archive[70..72], b"b ");
    }
}
