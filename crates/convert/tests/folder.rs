//! Folders as Hugging Face has them: what is converted, and what is refused in plain words.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::fs;
use std::path::Path;

use kiln_convert::{Conversion, Options};
use kiln_gguf::TensorType;
use serde_json::{Value, json};

/// Width of the model: whole blocks of Q8_0, but not its feed-forward layer.
const HIDDEN: usize = 64;
const FORWARD: usize = 72;

fn settings() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 94, "hidden_size": HIDDEN,
        "intermediate_size": FORWARD, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "use_cache": true, "torch_dtype": "float16",
        "transformers_version": "4.50.0", "attention_dropout": 0.1, "pretraining_tp": 1, "frob": false,
        "_name_or_path": "x", "initializer_range": 0.02,
    })
}

/// A folder with a model of one layer, whose settings are changed by these.
fn write(folder: &Path, change: &Value) {
    let mut config = settings();
    for (key, value) in change.as_object().unwrap() {
        config[key] = value.clone();
    }
    let vocab: serde_json::Map<_, _> = ('!'..='~').zip(0..).map(|(c, i)| (c.to_string(), i.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let shapes = [
        ("model.embed_tokens.weight".to_owned(), vec![94, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        (layer("input_layernorm"), vec![HIDDEN]),
        (layer("post_attention_layernorm"), vec![HIDDEN]),
        (layer("self_attn.q_proj"), vec![HIDDEN, HIDDEN]),
        (layer("self_attn.k_proj"), vec![HIDDEN, HIDDEN]),
        (layer("self_attn.v_proj"), vec![HIDDEN, HIDDEN]),
        (layer("self_attn.o_proj"), vec![HIDDEN, HIDDEN]),
        (layer("mlp.gate_proj"), vec![FORWARD, HIDDEN]),
        (layer("mlp.up_proj"), vec![FORWARD, HIDDEN]),
        (layer("mlp.down_proj"), vec![HIDDEN, FORWARD]),
    ];
    let (mut at, mut header) = (0, serde_json::Map::new());
    for (name, shape) in shapes {
        let end = at + shape.iter().product::<usize>() * 2;
        header.insert(name, json!({"dtype": "F16", "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let header = Value::from(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; at]].concat();
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.join("tokenizer_config.json"), "{}").unwrap();
}

fn open(folder: &Path, ty: TensorType) -> Result<Conversion, String> {
    let options = Options { ty, file_type: 1, pre: None, name: None };
    Conversion::open(folder, &options).map_err(|why| why.to_string())
}

#[test]
fn settings_that_may_change_the_result_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (change, want) in [
        (json!({}), None),
        (json!({"use_sliding_window": false, "sliding_window": 4, "max_window_layers": 2}), None),
        (json!({"layer_types": ["full_attention"]}), None),
        (json!({"frob": 1}), Some("the setting frob (1)")),
        (json!({"frob": true}), Some("the setting frob (true)")),
        (json!({"quantization_config": {"bits": 4}}), Some("the setting quantization_config")),
        (json!({"attention_bias": true}), Some("attention_bias is true")),
        (json!({"mlp_bias": true}), Some("mlp_bias is true")),
        (json!({"use_sliding_window": true, "sliding_window": 4}), Some("sliding window")),
        (json!({"layer_types": ["sliding_attention"]}), Some("sliding window")),
        (json!({"hidden_act": "relu"}), Some("hidden_act is \"relu\", which")),
    ] {
        write(folder.path(), &change);
        let got = open(folder.path(), TensorType::F16);
        match (want, got) {
            (None, got) => assert!(got.is_ok(), "{change}: {:?}", got.err()),
            (Some(want), Err(why)) => {
                assert!(why.contains(want) && why.contains("\nhint: ") && !why.contains("Some("), "{change}: {why}");
            }
            (Some(want), Ok(_)) => panic!("{change}: it is converted, want {want}"),
        }
    }
}

#[test]
fn a_folder_that_is_not_there_is_told_in_plain_words() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("no");
    let why = open(&missing, TensorType::F16).err().unwrap();
    assert!(why.starts_with(&format!("there is no folder {}\n", missing.display())), "{why}");
    let why = open(folder.path(), TensorType::F16).err().unwrap();
    assert!(why.starts_with("there is no config.json in"), "{why}");
}

#[test]
fn what_the_file_cannot_say_is_noted() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &json!({"sliding_window": 128}));
    let conversion = open(folder.path(), TensorType::F16).ok().unwrap();
    assert!(conversion.notes()[0].contains("sliding_window is 128"), "{:?}", conversion.notes());
    write(folder.path(), &json!({}));
    assert!(open(folder.path(), TensorType::F16).ok().unwrap().notes().is_empty());
    // One matrix has rows of 72 values.
    let notes = open(folder.path(), TensorType::Q8_0).ok().unwrap().notes().to_vec();
    assert_eq!(notes, ["1 matrices stay F16: Q8_0 wants rows of a multiple of 32 values"]);
}
