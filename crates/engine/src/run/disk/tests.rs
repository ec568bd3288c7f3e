//! A cache folder without an engine.

use std::sync::Arc;

use super::*;
use crate::run::cache::PageKind;

fn hash(i: u8) -> PrefixHash {
    PrefixHash::parse(&format!("{i:032x}")).unwrap()
}

fn page(i: u8) -> DiskKey {
    DiskKey::Page(PageKind::Full, hash(i))
}

fn blob(i: u8) -> Blob {
    Arc::new(vec![i; 100])
}

const MODEL: [u8; 32] = [1; 32];

/// A folder that is opened, filled and closed.
fn filled(folder: &Path, limit: u64, keys: &[DiskKey]) -> DiskTier {
    let mut disk = DiskTier::open(folder, limit, &MODEL).unwrap();
    keys.iter().zip(1..).for_each(|(key, i)| disk.write(*key, &blob(i)));
    drop(disk);
    DiskTier::open(folder, limit, &MODEL).unwrap()
}

#[test]
fn names_are_read_as_they_are_written() {
    let state = DiskKey::State { pages: hash(7), tail: 63, prefix: hash(9) };
    for key in [page(3), DiskKey::Page(PageKind::Window, hash(255)), state] {
        assert_eq!(DiskKey::parse(&key.name()), Some(key));
    }
    for wrong in ["", "page-0-12.kv", "page-2-00.kv", "state-1-2-3.kv", "secret", "page-00-x.kv"] {
        assert_eq!(DiskKey::parse(wrong), None, "{wrong}");
    }
}

#[test]
fn what_is_written_is_found_by_the_next_process_with_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let state = DiskKey::State { pages: hash(1), tail: 5, prefix: hash(2) };
    let mut disk = filled(folder.path(), 1 << 20, &[page(1), state]);
    assert_eq!((disk.read(&page(1)), disk.read(&state)), (Some(blob(1)), Some(blob(2))));
    assert_eq!((disk.tails(hash(1)), disk.tails(hash(2))), (vec![5], vec![]));
    assert_eq!(disk.read(&page(2)), None);
    let mut other = DiskTier::open(folder.path(), 1 << 20, &[2; 32]).unwrap();
    assert_eq!(other.read(&page(1)), None, "another model");
    assert_ne!(other.key(), disk.key());
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::metadata(folder.path().join(SECRET)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

#[test]
fn the_least_recently_used_files_go_first_also_those_of_other_models() {
    let folder = tempfile::tempdir().unwrap();
    let each = file::file_bytes(100);
    drop(filled(folder.path(), 1 << 20, &[page(1), page(2)]));
    let mut other = DiskTier::open(folder.path(), 4 * each, &[2; 32]).unwrap();
    (3..6).for_each(|i| other.write(page(i), &blob(i)));
    assert_eq!(other.bytes(), 4 * each, "a file of the first model is gone");
    assert_eq!(other.read(&page(5)), Some(blob(5)), "written or not yet");
    (6..9).for_each(|i| other.write(page(i), &blob(i)));
    drop(other);
    let mut first = DiskTier::open(folder.path(), 4 * each, &MODEL).unwrap();
    assert_eq!((first.read(&page(1)), first.read(&page(2)), first.bytes()), (None, None, 4 * each));
    // A limit that was lowered holds at once.
    drop(first);
    drop(DiskTier::open(folder.path(), each, &MODEL).unwrap());
    assert_eq!(DiskTier::open(folder.path(), 1 << 20, &MODEL).unwrap().bytes(), each);
}

#[test]
fn damaged_and_foreign_files_are_not_taken_and_unfinished_ones_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let disk = filled(folder.path(), 1 << 20, &[page(1), page(2), page(3)]);
    let path = |i| disk.folder.join(page(i).name());
    let mut bytes = std::fs::read(path(1)).unwrap();
    bytes[40] ^= 1;
    std::fs::write(path(1), &bytes).unwrap();
    std::fs::copy(path(3), path(2)).unwrap();
    let unfinished = disk.folder.join(".kiln-unfinished.tmp");
    let stranger = disk.folder.join("notes.txt");
    std::fs::write(&unfinished, b"x").unwrap();
    std::fs::write(&stranger, b"x").unwrap();
    let first = path(1);
    drop(disk);
    let mut disk = DiskTier::open(folder.path(), 1 << 20, &MODEL).unwrap();
    assert_eq!((disk.read(&page(1)), disk.read(&page(2)), disk.read(&page(3))), (None, None, Some(blob(3))));
    assert!(!disk.contains(&page(1)));
    drop(disk);
    assert!(!first.exists() && !unfinished.exists() && stranger.exists());
}

#[test]
fn a_folder_that_cannot_be_written_to_costs_nothing_but_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = filled(folder.path(), 1 << 20, &[page(1)]);
    // No file can be made any more, not even by root.
    let (own, aside) = (disk.folder.clone(), folder.path().join("aside"));
    std::fs::rename(&own, &aside).unwrap();
    std::fs::write(&own, b"no folder").unwrap();
    disk.write(page(2), &blob(2));
    disk.finish();
    assert!(disk.is_full.load(Ordering::Relaxed));
    assert_eq!(disk.read(&page(2)), None);
    let file = folder.path().join("file");
    std::fs::write(&file, b"").unwrap();
    assert!(DiskTier::open(&file, 1 << 20, &MODEL).is_err(), "a file is no folder");
    std::fs::write(aside.parent().unwrap().join(SECRET), b"short").unwrap();
    let why = DiskTier::open(folder.path(), 1 << 20, &MODEL).err().unwrap().to_string();
    assert!(why.contains("not the secret"), "{why}");
}
