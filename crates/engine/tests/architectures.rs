//! Every architecture against llama.cpp, on a tiny model of its kind.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod heads_of_files;
mod tiny;

use std::path::PathBuf;
use std::sync::Arc;

use kiln_engine::arch::{BatchShape, LIMITS, REFUSED, Room, TABLE, graph};
use kiln_engine::compare;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::lower::{Target, lower};
use kiln_engine::model::Model;
use kiln_engine::run::{Engine, Entry, SequenceId, Wanted};
use kiln_gguf::{Gguf, Metadata, Strings, TensorType, Value};

use tiny::{goldens, model, model_of, words};

/// Architectures whose goldens are elsewhere (`rwkv.rs`).
const ELSEWHERE: [&str; 4] = ["rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7"];

#[test]
fn logits_are_those_of_llama_cpp() {
    let mut wrong = Vec::new();
    for (name, golden) in goldens() {
        let model = model(&golden);
        let (tokens, positions) = (words(&golden, "tokens"), words(&golden, "positions"));
        let want: Vec<f32> = words(&golden, "logits").into_iter().map(f32::from_bits).collect();
        let room = Room { k_type: TensorType::F32, v_type: TensorType::F32, ..Room::one(tokens.len()) };
        let mut check = |all: &[f32], form: &str| {
            let width = all.len() / tokens.len();
            let got = positions.iter().flat_map(|p| &all[*p as usize * width..][..width]);
            let error = error(&got.copied().collect::<Vec<f32>>(), &want);
            // llama.cpp takes GELU from a table of 16-bit floats.
            if error.is_nan() || error > 1e-6 {
                wrong.push(format!("{name}{form}: {error:.1e}"));
            }
        };
        // What answers a text needs one that was read; then it is fed as one alone.
        if model.facts.start.is_some() {
            check(&alone(&Arc::new(model), &tokens), "");
            continue;
        }
        let graph = graph(&model.config, &model.gguf, &room).unwrap();
        let shape = BatchShape::new(tokens.len(), tokens.len());
        // Where it has latents, prompts have two forms.
        let expanded = graph.expanding(shape, &Target::cpu());
        assert_eq!(expanded.expands, graph.facts().latents, "{name}");
        for shape in [Some(shape), Some(expanded).filter(|shape| shape.expands)].into_iter().flatten() {
            let plan = lower(graph.plan(shape).unwrap(), &Target::cpu()).unwrap();
            let mut executor = CpuExecutor::new(Arithmetic::Fast);
            let all = compare::logits(&model, &graph, &plan, (shape, &tokens), &mut executor).unwrap();
            check(&all, if shape.expands { ", expanded" } else { "" });
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Layers of Llama 4 see chunks of 8,192 tokens: this prompt begins a second one.
#[test]
fn a_prompt_goes_on_in_the_next_chunk() {
    let golden = tiny::long("llama4-chunks");
    let model = model(&golden);
    let (tokens, positions) = (words(&golden, "tokens"), words(&golden, "positions"));
    let want: Vec<f32> = words(&golden, "logits").into_iter().map(f32::from_bits).collect();
    let room = Room { k_type: TensorType::F32, v_type: TensorType::F32, ..Room::one(tokens.len()) };
    let graph = graph(&model.config, &model.gguf, &room).unwrap();
    let shape = BatchShape::new(tokens.len(), tokens.len());
    let plan = lower(graph.plan(shape).unwrap(), &Target::cpu()).unwrap();
    let mut executor = CpuExecutor::new(Arithmetic::Fast);
    let all = compare::logits(&model, &graph, &plan, (shape, &tokens), &mut executor).unwrap();
    let width = all.len() / tokens.len();
    let got: Vec<f32> = positions.iter().flat_map(|p| &all[*p as usize * width..][..width]).copied().collect();
    let error = error(&got, &want);
    assert!(error < 1e-6, "{error:.1e}");
}

/// Placement, memory planning and the engine build graphs for contexts of their own, and all of them number slots.
#[test]
fn slots_have_the_same_numbers_whatever_the_context() {
    for (name, golden) in goldens() {
        let model = model(&golden);
        let slots = |context: usize| -> Option<Vec<String>> {
            let graph = model.graph(&Room::one(context)).ok()?;
            Some(graph.fixed().slots.iter().map(|slot| slot.name.clone()).collect())
        };
        // Some architectures refuse contexts that are too long for what Kiln knows of them.
        let Some(long) = slots(model.config.context) else { continue };
        assert_eq!(slots(1), Some(long), "{name}");
    }
}

/// Sum of squared differences over sum of squares.
fn error(got: &[f32], want: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    // Where both are infinite, they are the same.
    let pairs = got.iter().zip(want).filter(|(g, w)| g != w);
    let differences = squares(&mut pairs.map(|(g, w)| f64::from(*g) - f64::from(*w)));
    differences / squares(&mut want.iter().filter(|w| w.is_finite()).map(|w| f64::from(*w)))
}

/// What a model gives of every token: logits, or vectors where it has none.
fn results(engine: &mut Engine, entries: &[Entry<'_>]) -> Vec<Vec<f32>> {
    let encodes = engine.model().facts.encodes;
    if encodes { engine.vectors(entries) } else { engine.feed(entries) }.unwrap()
}

/// A sequence for a text. One that answers a text answers this very one, as the goldens have it.
fn opened(engine: &mut Engine, text: &[u32]) -> SequenceId {
    let sequence = engine.open(0).unwrap();
    if engine.start().is_some() {
        engine.read_source(sequence, text).unwrap();
    }
    sequence
}

/// Room for so many texts of up to so many tokens, and for as many that they answer.
fn sized(sequences: usize, tokens: usize) -> Room {
    let room = Room::for_sequences(sequences, tokens.next_multiple_of(64));
    Room { k_type: TensorType::F32, v_type: TensorType::F32, pages: 2 * room.pages, ..room }
}

/// What a model gives of every token of a text that is fed at once, with nothing beside it.
fn alone(model: &Arc<Model>, text: &[u32]) -> Vec<f32> {
    let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
    let mut engine = Engine::new(Arc::clone(model), executor, sized(1, text.len()), &mut |_, _| {}).unwrap();
    let sequence = opened(&mut engine, text);
    results(&mut engine, &[Entry { sequence, tokens: text, wanted: Wanted::All }]).remove(0)
}

/// Feeds three texts of different lengths together, in pieces of 16, 3 and 1 tokens, and compares what comes of the golden's
/// tokens with llama.cpp, and the others with what each says alone.
fn together(golden: &Gguf, executor: Box<dyn Executor>) -> f64 {
    let model = Arc::new(model(golden));
    let (tokens, positions) = (words(golden, "tokens"), words(golden, "positions"));
    let want: Vec<f32> = words(golden, "logits").into_iter().map(f32::from_bits).collect();
    let texts = [&tokens[..], &tokens[7..31], &tokens[3..8]];
    let mut engine = Engine::new(Arc::clone(&model), executor, sized(3, tokens.len()), &mut |_, _| {}).unwrap();
    let ids = texts.map(|text| opened(&mut engine, text));
    let mut fed = [0; 3];
    let whole = model.facts.sees_all;
    let mut got: [Vec<f32>; 3] = Default::default();
    for round in 0.. {
        let pieces: Vec<(usize, &[u32])> = (0..3)
            .map(|i| (i, &texts[i][fed[i]..]))
            .filter(|(_, rest)| !rest.is_empty())
            .map(|(i, rest)| (i, &rest[..if whole { rest.len() } else { [16, 3, 1][(round + i) % 3].min(rest.len()) }]))
            .collect();
        if pieces.is_empty() {
            break;
        }
        let entries: Vec<Entry<'_>> =
            pieces.iter().map(|(i, tokens)| Entry { sequence: ids[*i], tokens, wanted: Wanted::All }).collect();
        for (logits, (i, tokens)) in results(&mut engine, &entries).into_iter().zip(&pieces) {
            got[*i].extend(logits);
            fed[*i] += tokens.len();
        }
    }
    let width = got[0].len() / tokens.len();
    let row = |p: &u32| got[0][*p as usize * width..][..width].to_vec();
    let first = error(&positions.iter().flat_map(row).collect::<Vec<f32>>(), &want);
    (1..3).map(|i| error(&got[i], &alone(&model, texts[i]))).fold(first, f64::max)
}

#[test]
fn texts_together_and_in_pieces_are_as_each_alone() {
    let mut wrong = Vec::new();
    for (name, golden) in goldens() {
        let error = together(&golden, Box::new(CpuExecutor::new(Arithmetic::Fast)));
        if error.is_nan() || error > 1e-6 {
            wrong.push(format!("{name}: {error:.1e}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Kernels are compiled for each architecture, which takes long where the CPU stands in for a GPU: without
/// `KILN_ARCHITECTURES`, three kinds of latent attention, two encoders and one model that answers texts stand for all. It holds how names begin, with commas between; an empty one
/// means every architecture.
#[test]
fn texts_together_on_a_device_are_as_each_alone() {
    let names = std::env::var("KILN_ARCHITECTURES")
        .unwrap_or_else(|_| "deepseek2,glm-dsa-shared,minicpm3,jina-bert-v2,modern-bert,t5-relu".to_owned());
    let mut wrong = Vec::new();
    for (name, golden) in goldens() {
        if !names.split(',').any(|begin| name.starts_with(begin)) {
            continue;
        }
        let Some((executor, _instance)) = device::gpu() else { return };
        let error = together(&golden, executor);
        println!("{name}: {error:.1e}");
        if error.is_nan() || error > 1e-6 {
            wrong.push(format!("{name}: {error:.1e}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_architecture_has_a_golden() {
    let goldens = goldens();
    let has = |name: &str| goldens.iter().any(|(file, _)| file.rsplit_once('-').is_some_and(|(of, _)| of == name));
    let without: Vec<&str> =
        TABLE.iter().map(|row| row.name).filter(|name| !ELSEWHERE.contains(name) && !has(name)).collect();
    assert!(without.is_empty(), "{without:?}");
}

/// `docs/architectures.md` as the tables and goldens have it.
fn documented() -> String {
    let goldens = goldens();
    let heads: Vec<String> = heads_of_files::goldens()
        .into_iter()
        .filter_map(|(file, _)| {
            Some(file.rsplit_once('-')?.0.trim_end_matches("-plain").trim_end_matches("-shared").to_owned())
        })
        .collect();
    let mut text = String::from(
        "# Architectures\n\nWritten by a test from the table in `crates/engine/src/arch/mod.rs` \
         (`KILN_UPDATE_SNAPSHOTS=1 cargo test -p kiln-engine --test architectures documents`).\n\n\
         Every architecture runs on the CPU and on every Vulkan device: an architecture makes one plan, and devices lower it. \
         Layers at the end of a file that only guess further tokens (`nextn_predict_layers`) draft where [Speculative decoding](speculative.md) names the architecture, \
         and are left out elsewhere.\n\n\
         Judged by: tiny models that llama.cpp's tests make, with weights drawn so that every part counts. llama.cpp gives their \
         logits, of encoders the vectors (`scripts/oracle/archs`, `scripts/oracle/encoders`, `scripts/oracle/t5`); some of them are in `crates/engine/tests/goldens/architectures` and tested always, \
         whole, in pieces and beside other texts.\n\n\
         Drafts: whether a head in the model's file can draft. Converted from: classes of `config.json` that `kiln convert` reads. \
         Pictures and sounds go by the encoder beside a model ([Vision](vision.md), [Sound](sound.md)), tools by its chat template ([Tools](serving/tools.md)).\n\n\
         | name | models | remembers | drafts | converted from | judged by | bounds |\n| --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for row in TABLE {
        let of = |file: &str| file.rsplit_once('-').is_some_and(|(of, _)| of == row.name);
        let files: Vec<&(String, Gguf)> = goldens.iter().filter(|(file, _)| of(file)).collect();
        let ones = |_: &str, shape: &[usize]| 1f32.to_le_bytes().repeat(shape.iter().product());
        let facts = files.first().map(|(_, golden)| model_of(golden, ones).facts);
        let remembers = match facts {
            Some(facts) if facts.encodes => "nothing: it gives vectors",
            Some(facts) if facts.start.is_some() => "keys and values of two texts",
            Some(facts) if facts.has_cache() && facts.has_state() => "keys and values, states",
            Some(facts) if facts.has_state() => "states",
            Some(facts) if facts.value_elements == 0 => "latents",
            Some(_) => "keys and values",
            None => "states",
        };
        let names: Vec<String> = files.iter().map(|(file, _)| format!("`{file}`")).collect();
        let judged = if names.is_empty() { "`crates/engine/tests/rwkv.rs`".to_owned() } else { names.join(", ") };
        let bound = LIMITS.iter().find(|(name, _)| *name == row.name).map_or("", |(_, bound)| bound);
        let drafts = if heads.iter().any(|head| head == row.name) { "yes" } else { "" };
        let classes = kiln_convert::families().filter(|(name, _)| *name == row.name).flat_map(|(_, classes)| classes);
        let classes: Vec<String> = classes.map(|class| format!("`{class}`")).collect();
        let (name, models, classes) = (row.name, row.models, classes.join(", "));
        text += &format!("| `{name}` | {models} | {remembers} | {drafts} | {classes} | {judged} | {bound} |\n");
    }
    text += "\n## Known and refused\n\n| name | why |\n| --- | --- |\n";
    for (name, why) in REFUSED {
        text += &format!("| `{name}` | {why} |\n");
    }
    text
}

#[test]
fn documents_are_as_the_table() {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "..", "..", "docs", "architectures.md"].iter().collect();
    if std::env::var_os("KILN_UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, documented()).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap();
    assert_eq!(documented(), written, "KILN_UPDATE_SNAPSHOTS=1 writes the new page");
    let twice = REFUSED.iter().find(|(name, _)| TABLE.iter().any(|row| row.name == *name));
    assert!(twice.is_none(), "{twice:?} is run and refused");
}

/// What a file says of weights that were turned is checked before anything is computed: read as plain ones they make nonsense.
#[test]
fn turned_weights_that_kiln_does_not_know_are_refused_by_key() {
    let refused = |file: &str, key: &str, value: Value| {
        let key = format!("prism.hadamard.{key}");
        let change = |metadata: &mut Metadata, _: &mut Vec<String>| metadata.set(key.clone(), value.clone());
        let why =
            tiny::changed(&tiny::golden(file), tiny::drawn, change).err().expect("it should be refused").to_string();
        assert!(why.contains(&key), "{why}");
        why
    };
    let names = |all: &[&str]| Value::from(all.iter().collect::<Strings>());
    for (key, value, word) in [
        ("version", 3u32.into(), "newer"),
        ("transform", "haar".into(), "normalized-sylvester"),
        ("axis", "output".into(), "input-last-dimension"),
        ("block_size", 48u32.into(), "power of two"),
        ("block_size", 128u32.into(), "divisor of the 64 columns"),
        ("sign_mode", "random".into(), "explicit"),
        ("sign_values", vec![1i32; 64].into(), "192 numbers, as sign_widths adds up to"),
        ("sign_values", vec![0i32; 192].into(), "1 or -1"),
        ("weight_names", names(&["blk.0.attn_norm.weight"]), "attn_norm"),
        ("weight_names", names(&[]), "at least one"),
        ("inverse_weight_names", names(&["output.weight"]), "token_embd.weight"),
        ("tied_output", true.into(), "version 2"),
    ] {
        let why = refused("qwen35-hadamard", key, value);
        assert!(why.contains(word), "{key}: {why}");
    }
    let why = refused("olmo2-dense", "version", 1u32.into());
    assert!(why.contains("olmo2") && why.contains("qwen35moe"), "{why}");
}
