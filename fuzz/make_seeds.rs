//! Writes the seeds of the corpus: small valid files that reach every value type. Usage: make_seeds FOLDER

use std::path::PathBuf;

use kiln_gguf::{Array, Metadata, Strings, TensorType, Value, Writer};

fn main() {
    let folder = PathBuf::from(std::env::args().nth(1).expect("usage: make_seeds FOLDER"));
    let save = |name: &str, writer: Writer<'_>| writer.save(folder.join(name)).expect("the seed should be written");

    save("empty", Writer::new(Metadata::new()));

    let mut scalars = Metadata::new();
    let values: [Value; 13] = [
        1_u8.into(),
        (-1_i8).into(),
        2_u16.into(),
        (-2_i16).into(),
        3_u32.into(),
        (-3_i32).into(),
        0.5_f32.into(),
        true.into(),
        "text".into(),
        4_u64.into(),
        (-4_i64).into(),
        0.25_f64.into(),
        Value::Str(vec![0xff]),
    ];
    for (number, value) in values.into_iter().enumerate() {
        scalars.set(format!("v{number}"), value);
    }
    save("scalars", Writer::new(scalars));

    let mut arrays = Metadata::new();
    let values: [Array; 13] = [
        Array::U8(vec![1]),
        Array::I8(vec![-1]),
        Array::U16(vec![2]),
        Array::I16(vec![-2]),
        Array::U32(vec![3]),
        Array::I32(vec![-3]),
        Array::F32(vec![0.5]),
        Array::Bool(vec![true, false]),
        Array::Str(["a", ""].iter().collect::<Strings>()),
        Array::U64(vec![4]),
        Array::I64(vec![]),
        Array::F64(vec![0.25]),
        Array::Array(vec![Array::Array(vec![Array::U8(vec![1])])]),
    ];
    for (number, value) in values.into_iter().enumerate() {
        arrays.set(format!("a{number}"), value);
    }
    save("arrays", Writer::new(arrays));

    let mut tensors = Metadata::new();
    tensors.set("general.alignment", 8_u32);
    let mut writer = Writer::new(tensors);
    writer.add("f", &[3], TensorType::F32, vec![1; 12]).expect("the tensor should be valid");
    writer.add("q", &[32, 2], TensorType::Q4_0, vec![2; 36]).expect("the tensor should be valid");
    writer.add("b", &[1, 1, 1, 2], TensorType::BF16, vec![3; 4]).expect("the tensor should be valid");
    save("tensors", writer);

    let mut model = Metadata::new();
    model.set("general.architecture", "llama");
    model.set("llama.block_count", 1_u32);
    model.set("split.no", 0_u16);
    model.set("split.count", 0_u16);
    model.set("split.tensors.count", 1_i32);
    model.set("tokenizer.ggml.tokens", ["<s>", "a"].iter().collect::<Strings>());
    let mut writer = Writer::new(model);
    writer.add("output.weight", &[4, 2], TensorType::F16, vec![0; 16]).expect("the tensor should be valid");
    save("model", writer);
}
