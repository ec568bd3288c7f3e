//! Any bytes either give an error or a header that holds: data in bounds, getters that answer, and a file that survives
//! being written and read again.

#![no_main]

use kiln_gguf::{Gguf, Header, Metadata, Writer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = Header::parse(bytes) else { return };
    let len = bytes.len() as u64;
    for (number, info) in header.tensors.iter().enumerate() {
        let end = info.offset.checked_add(info.bytes as u64).expect("the end should not overflow");
        assert!(info.offset >= header.data_offset && end <= len, "{info:?} lies outside of {len} bytes");
        assert_eq!(info.n_elements(), info.cols() * info.rows());
        assert_eq!(info.ty.row_bytes(info.n_elements()), Some(info.bytes));
        for other in &header.tensors[..number] {
            let apart = other.offset + other.bytes as u64 <= info.offset || end <= other.offset;
            assert!(apart && other.name != info.name, "{info:?} and {other:?} are not apart");
        }
    }
    ask_everything(&header.metadata);

    let model = Gguf::from_bytes(bytes.to_vec()).expect("a header that parses should open");
    let first = write_again(&model);
    let second = write_again(&Gguf::from_bytes(first.clone()).expect("what was written should open"));
    assert!(first == second, "writing a file twice changed it");
});

fn ask_everything(metadata: &Metadata) {
    for (key, value) in metadata.iter() {
        assert!(metadata.contains(key) && !value.type_name().is_empty() && !value.to_string().is_empty());
        let _ = (metadata.get_u32(key), metadata.get_i32(key), metadata.get_u64(key), metadata.get_i64(key));
        let _ = (metadata.get_f32(key), metadata.get_bool(key), metadata.get_str(key));
        let _ = (metadata.get_u32_array(key), metadata.get_i32_array(key), metadata.get_f32_array(key));
        if let Ok(strings) = metadata.get_str_array(key) {
            strings.iter().for_each(|string| assert!(string.len() <= isize::MAX as usize));
        }
    }
}

fn write_again(model: &Gguf) -> Vec<u8> {
    let mut writer = Writer::new(model.metadata().clone());
    for info in model.tensors() {
        writer.add(&info.name, info.dims(), info.ty, model.data(info)).expect("a tensor that was read can be written");
    }
    writer.to_bytes().expect("a model that was read can be written")
}
