//! What the reader takes and what it refuses: hostile and damaged headers, metadata getters, data slices.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, in its helping functions too")]

use kiln_gguf::{Array, Error, Gguf, Header, Metadata, ShapeError, Strings, TensorType, Value, Writer};

/// Bytes of a header, written field by field, so that the fields can be wrong.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    fn header(n_tensors: u64, n_entries: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(3).u64(n_tensors).u64(n_entries)
    }

    fn u8(mut self, value: u8) -> Raw {
        self.0.push(value);
        self
    }

    fn u32(mut self, value: u32) -> Raw {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Raw {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn string(mut self, bytes: &[u8]) -> Raw {
        self = self.u64(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64], ty: u32, start: u64) -> Raw {
        self = self.string(name.as_bytes()).u32(dims.len() as u32);
        for &dim in dims {
            self = self.u64(dim);
        }
        self.u32(ty).u64(start)
    }

    /// Pads to the default alignment and adds this many bytes of data.
    fn data(mut self, bytes: usize) -> Raw {
        self.0.resize(self.0.len().next_multiple_of(32) + bytes, 0);
        self
    }

    fn error(&self) -> Error {
        Header::parse(&self.0).expect_err("the header should be refused")
    }
}

fn small_model() -> Vec<u8> {
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "llama");
    metadata.set("a.u8", 200_u8);
    metadata.set("a.i64", -5_i64);
    metadata.set("a.f32", 0.5_f32);
    metadata.set("a.bool", true);
    metadata.set("tokens", ["a", "bc", ""].iter().collect::<Strings>());
    metadata.set("nested", Array::Array(vec![Array::U8(vec![1, 2]), Array::Str(Strings::default())]));
    let mut writer = Writer::new(metadata);
    writer.add("x", &[3], TensorType::F32, vec![1; 12]).unwrap();
    writer.add("y", &[32, 2], TensorType::Q8_0, vec![2; 68]).unwrap();
    writer.to_bytes().unwrap()
}

#[test]
fn every_cut_of_a_valid_file_is_refused() {
    let whole = small_model();
    let header = Header::parse(&whole).unwrap();
    let last = header.tensors.last().unwrap();
    let end = last.offset as usize + last.bytes;
    for len in 0..end {
        assert!(Header::parse(&whole[..len]).is_err(), "a file cut at byte {len} of {end} was accepted");
    }
    // Padding after the last tensor is not needed.
    Header::parse(&whole[..end]).unwrap();
}

#[test]
fn every_single_changed_byte_is_survived() {
    let whole = small_model();
    for at in 0..whole.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut changed = whole.clone();
            changed[at] ^= flip;
            if let Ok(model) = Gguf::from_bytes(changed) {
                model.tensors().iter().for_each(|info| assert_eq!(model.data(info).len(), info.bytes));
            }
        }
    }
}

#[test]
fn wrong_magic_says_what_the_file_may_be() {
    for (start, hint) in [
        (&b"version https://git-lfs.github.com/spec/v1"[..], "git lfs pull"),
        (b"<!DOCTYPE html>", "web page"),
        (b"PK\x03\x04 and so on", "PyTorch"),
        (b"tjgg\x01\0\0\0", "older GGML"),
        (b"lmgg\x01\0\0\0", "older GGML"),
        (b"\x40\0\0\0\0\0\0\0{\"__metadata__\"", "safetensors"),
        (b"abcdefghijk", "convert the model"),
    ] {
        let error = Header::parse(start).unwrap_err();
        assert!(matches!(error, Error::Magic { .. }) && error.to_string().contains(hint), "{error}");
    }
    assert!(matches!(Header::parse(b"GG").unwrap_err(), Error::Truncated { what: "magic", offset: 0, left: 2, .. }));
    assert!(matches!(Header::parse(b"").unwrap_err(), Error::Empty));
}

#[test]
fn versions_are_told_apart() {
    let with = |version: [u8; 4]| {
        let mut bytes = small_model();
        bytes[4..8].copy_from_slice(&version);
        Header::parse(&bytes)
    };
    assert_eq!(with([2, 0, 0, 0]).unwrap().version, 2);
    assert_eq!(with([3, 0, 0, 0]).unwrap().version, 3);
    assert!(matches!(with([1, 0, 0, 0]), Err(Error::Version1)));
    assert!(matches!(with([0, 0, 0, 3]), Err(Error::BigEndian { version: 3 })));
    assert!(matches!(with([0, 0, 0, 2]), Err(Error::BigEndian { version: 2 })));
    assert!(matches!(with([4, 0, 0, 0]), Err(Error::Version { version: 4 })));
    assert!(matches!(with([0, 0, 0, 0]), Err(Error::Version { version: 0 })));
}

#[test]
fn counts_are_checked_against_the_file() {
    let error = Raw::header(0, 1 << 60).error();
    assert!(matches!(error, Error::TooMany { what: "metadata entries", offset: 16, most: 0, .. }), "{error}");
    let error = Raw::header(u64::MAX, 0).error();
    assert!(matches!(error, Error::TooMany { what: "tensors", offset: 8, .. }), "{error}");
    for element in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] {
        for count in [100, 1 << 60, 1 << 61, u64::MAX] {
            let error = Raw::header(0, 1).string(b"key").u32(9).u32(element).u64(count).u64(0).error();
            assert!(
                matches!(&error, Error::TooMany { what: "array elements", offset: 43, count: got, .. } if *got == count),
                "{error}"
            );
            assert!(error.to_string().contains("`key`"), "{error}");
        }
    }
    let error = Raw::header(0, 1).string(b"key").u32(8).u64(u64::MAX).error();
    assert!(matches!(error, Error::Truncated { what: "string", needed: u64::MAX, offset: 47, .. }), "{error}");
    let error = Raw::header(0, 1).u64(1 << 40).u64(0).error();
    assert!(matches!(error, Error::NameTooLong { what: "metadata key", offset: 24, .. }), "{error}");
}

#[test]
fn bad_metadata_is_refused() {
    let error = Raw::header(0, 1).string(b"key").u32(13).u64(0).error();
    assert!(matches!(error, Error::ValueType { id: 13, offset: 35, .. }), "{error}");
    let error = Raw::header(0, 1).string(b"key").u32(9).u32(77).u64(0).error();
    assert!(matches!(error, Error::ValueType { id: 77, offset: 39, .. }), "{error}");
    let error = Raw::header(0, 1).string(b"key").u32(7).u8(2).error();
    assert!(matches!(error, Error::NotBool { value: 2, offset: 39, .. }), "{error}");
    let error = Raw::header(0, 1).string(b"\xff\xfe").u32(0).u8(0).error();
    assert!(matches!(error, Error::NameNotUtf8 { what: "metadata key", offset: 24, .. }), "{error}");
    let error = Raw::header(0, 2).string(b"key").u32(0).u8(1).string(b"key").u32(0).u8(2).error();
    assert!(matches!(&error, Error::DuplicateKey { key, offset: 40 } if key == "key"), "{error}");

    let nested = |depth: usize| {
        let mut raw = Raw::header(0, 1).string(b"key").u32(9);
        for _ in 1..depth {
            raw = raw.u32(9).u64(1);
        }
        raw.u32(0).u64(0)
    };
    Header::parse(&nested(4).0).unwrap();
    assert!(matches!(nested(5).error(), Error::TooDeep { most: 4, .. }));
}

#[test]
fn alignment_is_honoured_and_bounded() {
    let with = |alignment: Value| {
        let mut writer = Writer::new(Metadata::new());
        writer.metadata_mut().set("general.alignment", alignment);
        writer.add("x", &[1], TensorType::F32, vec![0; 4]).unwrap();
        writer.add("y", &[1], TensorType::F32, vec![1; 4]).unwrap();
        writer.to_bytes()
    };
    for alignment in [8_u32, 64, 4096] {
        let model = Gguf::from_bytes(with(alignment.into()).unwrap()).unwrap();
        assert_eq!(model.alignment(), alignment.into());
        let y = model.tensor("y").unwrap();
        assert_eq!((y.offset % u64::from(alignment), model.data(y)), (0, &[1; 4][..]));
    }
    for bad in [0_u32, 1, 4, 24, 3 << 20, 1 << 21] {
        assert!(matches!(with(bad.into()), Err(Error::Alignment { value, .. }) if value == u64::from(bad)));
        let raw = Raw::header(0, 1).string(b"general.alignment").u32(4).u32(bad);
        assert!(matches!(raw.error(), Error::Alignment { value, .. } if value == u64::from(bad)));
    }
    let error = Raw::header(0, 1).string(b"general.alignment").u32(8).string(b"x").error();
    assert!(matches!(error, Error::WrongType { .. }), "{error}");
}

#[test]
fn bad_tensors_are_refused_by_name() {
    let f32 = TensorType::F32.id();
    let one = |dims: &[u64], ty: u32, start: u64| Raw::header(1, 0).tensor("w", dims, ty, start).data(64).error();
    let why = |error: Error| match error {
        Error::TensorShape { name, offset: 24, why } if name == "w" => why,
        other => panic!("{other}"),
    };
    assert_eq!(why(one(&[], f32, 0)), ShapeError::Dims { n_dims: 0 });
    assert_eq!(why(one(&[1; 5], f32, 0)), ShapeError::Dims { n_dims: 5 });
    assert_eq!(why(one(&[1, 0], f32, 0)), ShapeError::Zero { dim: 1 });
    assert!(matches!(why(one(&[1 << 32, 1 << 32], f32, 0)), ShapeError::TooLarge { .. }));
    assert!(matches!(why(one(&[33], 2, 0)), ShapeError::Block { ty: TensorType::Q4_0, len: 33, block: 32 }));

    for id in [4, 31, 43, u32::MAX] {
        let error = one(&[1], id, 0);
        assert!(
            matches!(&error, Error::TensorType { name, id: got, offset: 45 } if name == "w" && *got == id),
            "{error}"
        );
    }
    assert!(matches!(one(&[1], f32, 4), Error::TensorMisaligned { start: 4, alignment: 32, .. }));
    for (len, start) in [(17, 0), (1, 64), (1, u64::MAX - 31), (1 << 60, 0), (1, 1 << 63)] {
        let error = one(&[len], f32, start);
        assert!(matches!(&error, Error::TensorOutOfFile { name, .. } if name == "w"), "{error}");
    }

    let two = |second: &str, start: u64| {
        Raw::header(2, 0).tensor("w", &[9], f32, 0).tensor(second, &[8], f32, start).data(128)
    };
    Header::parse(&two("v", 64).0).unwrap();
    for start in [0, 32] {
        let error = two("v", start).error();
        assert!(matches!(&error, Error::TensorOverlap { .. }), "{error}");
        assert!(error.to_string().contains("`w`") && error.to_string().contains("`v`"), "{error}");
    }
    assert!(matches!(two("w", 64).error(), Error::DuplicateTensor { .. }));

    let mut raw = two("v", 64);
    raw.0[32] = 0xff;
    assert!(matches!(raw.error(), Error::NameNotUtf8 { what: "tensor name", offset: 24, .. }));
}

#[test]
fn getters_name_the_key_and_take_any_width_that_fits() {
    let model = Gguf::from_bytes(small_model()).unwrap();
    let metadata = model.metadata();
    assert_eq!(metadata.get_u32("a.u8").unwrap(), 200);
    assert_eq!(metadata.get_i32("a.i64").unwrap(), -5);
    assert_eq!(metadata.get_f32("a.f32").unwrap(), 0.5);
    assert_eq!(metadata.get_u32_or("none", 7).unwrap(), 7);
    assert_eq!(metadata.get_u32_opt("none").unwrap(), None);
    assert_eq!(metadata.get_str("general.architecture").unwrap(), "llama");
    assert_eq!(metadata.get_str_or("none", "x").unwrap(), "x");
    assert!(metadata.get_bool("a.bool").unwrap());
    let tokens = metadata.get_str_array("tokens").unwrap();
    assert_eq!(tokens.iter().collect::<Vec<_>>(), [&b"a"[..], b"bc", b""]);
    assert_eq!((tokens.get(1), tokens.get(3)), (Some(&b"bc"[..]), None));
    assert_eq!(metadata.iter().map(|(key, _)| key).nth(1), Some("a.u8"));

    for (error, expected) in [
        (metadata.get_u32("a.i64").unwrap_err(), "`a.i64` should be an integer that fits u32 but is i64 (-5)"),
        (metadata.get_u32_or("a.f32", 1).unwrap_err(), "`a.f32` should be an integer that fits u32 but is f32 (0.5)"),
        (metadata.get_str("tokens").unwrap_err(), "is an array of strings of length 3"),
        (metadata.get_f32("a.u8").unwrap_err(), "`a.u8` should be a float but is u8 (200)"),
        (metadata.get_u32("none").unwrap_err(), "`none` is missing"),
        (model.tensor("none").unwrap_err(), "tensor `none` is missing"),
    ] {
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn arrays_convert_and_spread_over_layers() {
    let mut metadata = Metadata::new();
    metadata.set("heads", Array::U64(vec![4, 8]));
    metadata.set("single", 3_i32);
    metadata.set("signed", vec![1_i32, -1]);
    metadata.set("scores", Array::F64(vec![0.25]));
    assert_eq!(metadata.get_u32_array("heads").unwrap(), [4, 8]);
    assert_eq!(metadata.get_u32_per_layer("heads", 2).unwrap(), [4, 8]);
    assert_eq!(metadata.get_u32_per_layer("single", 3).unwrap(), [3, 3, 3]);
    assert!(matches!(metadata.get_u32_per_layer("heads", 3), Err(Error::WrongLength { expected: 3, got: 2, .. })));
    assert!(matches!(metadata.get_u32_per_layer("none", 3), Err(Error::MissingKey { .. })));
    assert!(matches!(metadata.get_u32_array("signed"), Err(Error::WrongType { .. })));
    assert_eq!(metadata.get_i32_array("signed").unwrap(), [1, -1]);
    assert_eq!(metadata.get_f32_array("scores").unwrap(), [0.25]);
    assert_eq!(metadata.remove("signed"), Some(Value::Array(Array::I32(vec![1, -1]))));
    assert_eq!(metadata.get_u32_array("heads").unwrap(), [4, 8]);
    assert_eq!(metadata.get_f32_array("scores").unwrap(), [0.25]);
    assert_eq!((metadata.contains("signed"), metadata.remove("signed")), (false, None));
}

#[test]
fn tokens_need_not_be_utf8_but_text_must() {
    let raw = Raw::header(0, 2)
        .string(b"tokens")
        .u32(9)
        .u32(8)
        .u64(2)
        .string(b"\xe2\x96")
        .string(b"ok")
        .string(b"text")
        .u32(8)
        .string(b"\xff");
    let metadata = Header::parse(&raw.0).unwrap().metadata;
    let tokens = metadata.get_str_array("tokens").unwrap();
    assert_eq!((tokens.get(0), tokens.text(1).as_deref()), (Some(&b"\xe2\x96"[..]), Some("ok")));
    assert!(metadata.get_str("text").unwrap_err().to_string().contains("`text` should be a UTF-8 string"));
}
