//! Writes the seeds of the corpus that are GGUF files: small valid ones that reach every value type, a vocabulary of each kind, and a model. The seeds
//! of other targets are text. Usage: make_seeds FOLDER

use std::path::{Path, PathBuf};

use kiln_gguf::{Array, Metadata, Strings, TensorType, Value, Writer};

fn main() {
    let corpus = PathBuf::from(std::env::args().nth(1).expect("usage: make_seeds FOLDER"));
    tokenizers(&corpus.join("tokenizers"));
    model(&corpus.join("models"));
    let folder = corpus.join("gguf_reader");
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

/// A vocabulary of each kind.
fn tokenizers(folder: &Path) {
    let words = [
        "<unk>",
        "<s>",
        "</s>",
        "a",
        "b",
        "ab",
        "abc",
        "\u{2581}a",
        "\u{120}b",
        "##c",
        "<0x41>",
        "\u{e9}",
        "1",
        "<|im_start|>",
    ];
    let types = [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 6, 1, 1, 4];
    for (model, pre) in [
        ("gpt2", "llama-bpe"),
        ("gpt2", "qwen2"),
        ("gemma4", ""),
        ("llama", ""),
        ("bert", ""),
        ("t5", ""),
        ("rwkv", ""),
    ] {
        let mut metadata = Metadata::new();
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        metadata.set(key("model"), model);
        metadata.set(key("pre"), pre);
        metadata.set(key("tokens"), words.iter().collect::<Strings>());
        metadata.set(key("token_type"), Value::Array(Array::I32(types.to_vec())));
        let scores = (0..words.len()).map(|i| -(i as f32)).collect();
        metadata.set(key("scores"), Value::Array(Array::F32(scores)));
        metadata.set(key("merges"), ["a b", "ab c"].iter().collect::<Strings>());
        for (role, id) in [("unknown", 0_u32), ("bos", 1), ("eos", 2), ("seperator", 2)] {
            metadata.set(key(&format!("{role}_token_id")), id);
        }
        metadata.set(key("add_bos_token"), true);
        metadata.set("text", "abc ab \u{e9}c 1 <|im_start|>A");
        let name = if pre.is_empty() { model.to_owned() } else { format!("{model}-{pre}") };
        Writer::new(metadata).save(folder.join(name)).expect("the seed should be written");
    }
}

/// A model as small as one can be.
fn model(folder: &Path) {
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "llama");
    let numbers = [("block_count", 1_u32), ("context_length", 64), ("embedding_length", 8), ("feed_forward_length", 8)];
    let heads = [("attention.head_count", 2_u32), ("attention.head_count_kv", 1), ("rope.dimension_count", 4)];
    numbers.iter().chain(&heads).for_each(|(key, value)| metadata.set(format!("llama.{key}"), *value));
    metadata.set("llama.attention.layer_norm_rms_epsilon", 1e-5_f32);
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "a"].iter().collect::<Strings>());
    metadata.set("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0; 4])));
    let mut writer = Writer::new(metadata);
    let mut put = |name: &str, shape: &[usize], ty: TensorType| {
        let bytes = shape.iter().product::<usize>() * if ty == TensorType::F16 { 2 } else { 4 };
        writer.add(name, shape, ty, vec![0; bytes]).expect("the tensor should be valid");
    };
    put("token_embd.weight", &[8, 4], TensorType::F16);
    put("output_norm.weight", &[8], TensorType::F32);
    for name in ["attn_norm", "ffn_norm"] {
        put(&format!("blk.0.{name}.weight"), &[8], TensorType::F32);
    }
    let rows = [
        ("attn_q", 8),
        ("attn_k", 4),
        ("attn_v", 4),
        ("attn_output", 8),
        ("ffn_gate", 8),
        ("ffn_up", 8),
        ("ffn_down", 8),
    ];
    rows.iter().for_each(|(name, rows)| put(&format!("blk.0.{name}.weight"), &[8, *rows], TensorType::F16));
    writer.save(folder.join("llama")).expect("the seed should be written");
}
