//! What is written can be read again: whole files, streams, split models, and nothing half-written is left behind.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, in its helping functions too")]

use std::fs;
use std::path::{Path, PathBuf};

use kiln_gguf::split::{KEY_COUNT, KEY_NO, KEY_TENSORS, part_name};
use kiln_gguf::{Array, Error, Gguf, Metadata, ShapeError, Strings, TensorType, Value, Writer};

/// A folder of its own for each test, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kiln-gguf-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn all_kinds_of_values() -> Metadata {
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "llama");
    let values: Vec<Value> = vec![
        255_u8.into(),
        (-128_i8).into(),
        65_535_u16.into(),
        (-32_768_i16).into(),
        u32::MAX.into(),
        i32::MIN.into(),
        f32::MIN_POSITIVE.into(),
        true.into(),
        false.into(),
        u64::MAX.into(),
        i64::MIN.into(),
        f64::MAX.into(),
        "grüße".into(),
        Value::Str(vec![0xff, 0]),
        Array::U8(vec![1, 2, 3]).into(),
        Array::I8(vec![-1]).into(),
        Array::U16(vec![700]).into(),
        Array::I16(vec![-700]).into(),
        vec![u32::MAX].into(),
        vec![i32::MIN, 0].into(),
        vec![1.5_f32, -0.0].into(),
        vec![true, false].into(),
        Array::U64(vec![u64::MAX]).into(),
        Array::I64(vec![]).into(),
        Array::F64(vec![1e300]).into(),
        ["", "a", "\u{10ffff}"].iter().collect::<Strings>().into(),
        Array::Array(vec![Array::Array(vec![Array::Bool(vec![true])]), Array::Array(vec![])]).into(),
    ];
    for (number, value) in values.into_iter().enumerate() {
        metadata.set(format!("test.value{number}"), value);
    }
    metadata
}

#[test]
fn what_is_saved_is_read_again() {
    let folder = Folder::new("round-trip");
    let path = folder.file("m.gguf");
    fs::write(&path, "an older file").unwrap();
    let metadata = all_kinds_of_values();
    let mut writer = Writer::new(metadata.clone());
    let x: Vec<u8> = (0..12).collect();
    writer.add("x", &[3], TensorType::F32, &x).unwrap();
    writer.add("y", &[32, 2, 1, 2], TensorType::Q8_0, vec![7; 136]).unwrap();
    writer.save(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), writer.to_bytes().unwrap());

    let model = Gguf::open(&path).unwrap();
    assert_eq!(model.version(), 3);
    assert!(model.metadata().iter().eq(metadata.iter()));
    assert_eq!(model.tensors().len(), 2);
    assert_eq!(model.data(model.tensor("x").unwrap()), x);
    let y = model.tensor("y").unwrap();
    assert_eq!((y.shape, y.n_dims, y.ty, y.bytes), ([32, 2, 1, 2], 4, TensorType::Q8_0, 136));
    assert_eq!((y.n_elements(), y.cols(), y.rows()), (128, 32, 4));
    assert_eq!(model.data(y), [7; 136]);
    assert_eq!((model.data_bytes(), model.paths().collect::<Vec<_>>()), (148, vec![path.as_path()]));
    assert_eq!(folder.names(), ["m.gguf"]);
}

#[test]
fn a_stream_takes_data_in_order_and_in_pieces() {
    let folder = Folder::new("stream");
    let mut writer = Writer::new(Metadata::new());
    writer.declare("x", &[3], TensorType::F32).unwrap();
    writer.declare("y", &[40], TensorType::I8).unwrap();
    let path = folder.file("s.gguf");
    let mut stream = writer.start(&path).unwrap();
    assert!(matches!(stream.write_tensor("y", &[0; 40]), Err(Error::WriteOrder { .. })));
    assert!(matches!(stream.write_tensor("x", &[0; 11]), Err(Error::WriteLength { expected: 12, got: 11, .. })));
    stream.write_tensor("x", &[1; 12]).unwrap();
    stream.write_piece("y", &[2; 30]).unwrap();
    assert!(matches!(stream.write_piece("y", &[2; 11]), Err(Error::WriteLength { expected: 40, got: 41, .. })));
    stream.write_piece("y", &[3; 10]).unwrap();
    assert!(matches!(stream.write_piece("z", &[]), Err(Error::WriteOrder { .. })));
    assert!(!path.exists(), "the file should appear only when finished");
    stream.finish().unwrap();
    assert_eq!(folder.names(), ["s.gguf"]);

    let model = Gguf::open(&path).unwrap();
    assert_eq!(model.data(model.tensor("x").unwrap()), [1; 12]);
    assert_eq!(model.data(model.tensor("y").unwrap()), [vec![2; 30], vec![3; 10]].concat());
}

#[test]
fn an_unfinished_file_leaves_nothing_behind() {
    let folder = Folder::new("unfinished");
    let mut writer = Writer::new(Metadata::new());
    writer.declare("x", &[3], TensorType::F32).unwrap();
    let path = folder.file("u.gguf");
    fs::write(&path, "kept").unwrap();
    assert!(matches!(writer.save(&path), Err(Error::WriteLength { expected: 12, got: 0, .. })));
    let mut stream = writer.start(&path).unwrap();
    stream.write_piece("x", &[0; 4]).unwrap();
    assert_eq!(folder.names().len(), 2, "the temporary file should be there");
    assert!(matches!(stream.finish(), Err(Error::WriteLength { expected: 12, got: 4, .. })));
    assert_eq!(folder.names(), ["u.gguf"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let mut writer = Writer::new(Metadata::new());
    writer.add("x", &[1], TensorType::F32, vec![0; 4]).unwrap();
    assert!(matches!(writer.declare("x", &[1], TensorType::F32), Err(Error::WriteTwice { .. })));
    assert!(matches!(writer.add("y", &[2], TensorType::F32, vec![0; 4]), Err(Error::WriteLength { .. })));
    assert!(matches!(
        writer.declare("y", &[31], TensorType::Q4_0),
        Err(Error::WriteShape { why: ShapeError::Block { .. }, .. })
    ));
    assert!(matches!(
        writer.declare("y", &[0], TensorType::F32),
        Err(Error::WriteShape { why: ShapeError::Zero { .. }, .. })
    ));
    assert!(matches!(writer.declare(&"y".repeat(70_000), &[1], TensorType::F32), Err(Error::WriteName { .. })));
    writer.metadata_mut().set("k".repeat(70_000), 1_u32);
    assert!(matches!(writer.to_bytes(), Err(Error::WriteName { .. })));
}

/// Writes part `no` of three with the keys as given; each part has one tensor named after it.
fn write_part(folder: &Folder, no: u64, keys: [(&str, u64); 3]) -> PathBuf {
    let mut metadata = Metadata::new();
    if no == 0 {
        metadata.set("general.architecture", "llama");
    }
    metadata.set(keys[0].0, keys[0].1 as u16);
    metadata.set(keys[1].0, keys[1].1 as u16);
    metadata.set(keys[2].0, keys[2].1 as i32);
    let mut writer = Writer::new(metadata);
    writer.add(&format!("t{no}"), &[4], TensorType::I8, vec![no as u8; 4]).unwrap();
    let path = folder.file(&part_name("big", no, 3));
    writer.save(&path).unwrap();
    path
}

fn write_three_parts(folder: &Folder) -> Vec<PathBuf> {
    (0..3).map(|no| write_part(folder, no, [(KEY_NO, no), (KEY_COUNT, 3), (KEY_TENSORS, 3)])).collect()
}

#[test]
fn any_part_opens_the_whole_split_model() {
    let folder = Folder::new("split");
    let parts = write_three_parts(&folder);
    assert!(parts[0].ends_with("big-00001-of-00003.gguf"));
    for part in &parts {
        let model = Gguf::open(part).unwrap();
        assert_eq!(model.metadata().get_str("general.architecture").unwrap(), "llama");
        assert!(model.paths().eq(parts.iter().map(PathBuf::as_path)));
        for no in 0..3_usize {
            let info = model.tensor(&format!("t{no}")).unwrap();
            assert_eq!((info.part, model.data(info)), (no, &[no as u8; 4][..]));
        }
    }
}

#[test]
fn missing_or_foreign_parts_are_named() {
    let refused = |path: &Path| Gguf::open(path).unwrap_err().to_string();
    let folder = Folder::new("split-bad");
    let parts = write_three_parts(&folder);
    fs::remove_file(&parts[1]).unwrap();
    let error = refused(&parts[2]);
    assert!(
        error.contains("1 of the model's 3 parts are missing") && error.contains("big-00002-of-00003.gguf"),
        "{error}"
    );

    // Each wrong value in part 2 is found, whichever part is opened.
    for (keys, expected) in [
        ([(KEY_NO, 2), (KEY_COUNT, 3), (KEY_TENSORS, 3)], "`split.no` is 2 where 1 belongs"),
        ([(KEY_NO, 1), (KEY_COUNT, 4), (KEY_TENSORS, 3)], "`split.count` is 4 where 3 belongs"),
        ([(KEY_NO, 1), (KEY_COUNT, 3), (KEY_TENSORS, 9)], "`split.tensors.count` is 9 where 3 belongs"),
        ([(KEY_NO, 1), ("x", 3), (KEY_TENSORS, 3)], "`split.count` is missing"),
    ] {
        write_part(&folder, 1, keys);
        let error = refused(&parts[0]);
        assert!(error.contains(expected) && error.contains("big-00002-of-00003.gguf"), "{error}");
    }
    write_part(&folder, 1, [(KEY_NO, 7), (KEY_COUNT, 3), (KEY_TENSORS, 3)]);
    assert!(refused(&parts[1]).contains("`split.no` is 7 where 2 belongs"));

    for no in 0..3 {
        write_part(&folder, no, [(KEY_NO, no), (KEY_COUNT, 3), (KEY_TENSORS, 4)]);
    }
    assert!(refused(&parts[0]).contains("`split.tensors.count` is 4 where 3 belongs"));

    write_three_parts(&folder);
    fs::copy(&parts[0], folder.file("renamed.gguf")).unwrap();
    let error = refused(&folder.file("renamed.gguf"));
    assert!(error.contains("does not end in `-00001-of-00003.gguf`"), "{error}");

    // Two parts with the same tensor.
    let mut writer = Writer::new(Metadata::new());
    writer.metadata_mut().set(KEY_NO, 1_u16);
    writer.metadata_mut().set(KEY_COUNT, 3_u16);
    writer.metadata_mut().set(KEY_TENSORS, 3_i32);
    writer.add("t0", &[4], TensorType::I8, vec![0; 4]).unwrap();
    writer.save(&parts[1]).unwrap();
    let error = refused(&parts[0]);
    assert!(error.contains("tensor `t0` occurs a second time") && error.contains("big-00002"), "{error}");
}

#[test]
fn a_joined_model_stands_alone() {
    let folder = Folder::new("joined");
    // Tools that join parts leave these keys.
    let path = write_part(&folder, 0, [(KEY_NO, 0), (KEY_COUNT, 0), (KEY_TENSORS, 1)]);
    assert_eq!(Gguf::open(&path).unwrap().tensors().len(), 1);
}

#[test]
fn errors_of_files_name_the_file() {
    let folder = Folder::new("errors");
    let path = folder.file("bad.gguf");
    assert!(Gguf::open(&path).unwrap_err().to_string().contains("bad.gguf"));
    fs::write(&path, "").unwrap();
    let error = Gguf::open(&path).unwrap_err().to_string();
    assert!(error.contains("bad.gguf: the file is empty"), "{error}");
    assert!(matches!(Gguf::open(&folder.0), Err(Error::Io { .. })));
    let nowhere = Writer::new(Metadata::new()).save(folder.file("no/such/folder.gguf"));
    assert!(matches!(nowhere, Err(Error::Write(_))));
}
