//! Text with drafts is the text without: for every source of drafts, every way of choosing tokens, caches that are cut, windows and states
//! that go back, on the CPU and on a GPU.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod heads_of_files;
mod tiny;

use std::sync::Arc;

use kiln_engine::arch::Room;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, Options};
use kiln_engine::model::{Adapter, Model};
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{
    Constraint, DraftLimits, DraftModel, EndReason, Engine, Event, Events, Heads, Lookup, Policy, Request, Scheduler,
    StopRule, Usage,
};
use kiln_engine::sampler::Sampling;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, Metadata, TensorType, Value, Writer};

use device::gpu_with;
use heads_of_files::{Weights, golden};

fn model(preset: &str, seed: u64) -> Model {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), seed);
    Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap()
}

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

/// What tells one run from another.
struct Setup<'a> {
    model: &'a Arc<Model>,
    executor: Box<dyn Executor>,
    /// Requests at once.
    together: usize,
    /// Pages of the cache.
    pages: usize,
    /// A model that drafts.
    draft: Option<DraftModel>,
    policy: Policy,
}

impl<'a> Setup<'a> {
    fn new(model: &'a Arc<Model>, executor: Box<dyn Executor>, together: usize) -> Setup<'a> {
        let policy = Policy { lookup: Lookup::Off, ..Policy::default() };
        Setup { model, executor, together, pages: 160, draft: None, policy }
    }

    /// The same with drafts by lookup.
    fn looking_up(self) -> Setup<'a> {
        Setup { policy: Policy { lookup: Lookup::On, ..self.policy }, ..self }
    }

    /// The same with a model that drafts.
    fn with_draft(self, draft: &Arc<Model>) -> Setup<'a> {
        let room = room(draft, 8, 160, 256, 32);
        let engine = Engine::new(Arc::clone(draft), cpu(), room, &mut |_, _| {}).unwrap();
        let limits = DraftLimits { most: 5, always: true, ..DraftLimits::default() };
        let policy = Policy { draft: limits, ..self.policy };
        Setup { draft: Some(DraftModel::new(engine, self.model).unwrap()), policy, ..self }
    }

    /// The same with drafts of the head in the model's file.
    fn with_head(self) -> Setup<'a> {
        let limits = DraftLimits { most: 5, always: true, ..DraftLimits::default() };
        Setup { policy: Policy { draft: limits, heads: Heads::On, ..self.policy }, ..self }
    }

    fn start(self) -> Scheduler {
        let executor = self.executor;
        let room = room(self.model, 2 * self.together, self.pages, 256, executor.batch());
        let mut engine = Engine::new(Arc::clone(self.model), executor, room, &mut |_, _| {}).unwrap();
        if let Some(draft) = self.draft {
            engine.draft_with(draft);
        }
        Scheduler::start(engine, self.policy)
    }
}

/// Room for so many sequences; of states twice as much, so that all of them can go back.
fn room(model: &Model, sequences: usize, pages: usize, context: usize, batch: usize) -> Room {
    Room { sequences, states: 2 * sequences, pages, ..Room::one(context) }.with_windows(model.facts.window, batch)
}

/// A prompt that says the same again and again, so that lookup finds what follows.
fn repeating(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i % 9 * 23 + salt * 31) % 256).collect()
}

/// Only tokens of a few residues, so that drafts of lookup are often refused; every third token is forced, and known to be.
#[derive(Clone)]
struct Residues(usize);

impl Constraint for Residues {
    fn mask(&mut self) -> Result<Vec<u32>, String> {
        let allowed = |id: u32| if self.0.is_multiple_of(3) { id == 10 } else { id.is_multiple_of(5) };
        Ok((0..9).map(|word| (0..32).filter(|bit| allowed(32 * word + bit)).map(|bit| 1 << bit).sum()).collect())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        let fine = if self.0.is_multiple_of(3) { token == 10 } else { token.is_multiple_of(5) };
        self.0 += 1;
        if fine { Ok(()) } else { Err(format!("{token} is not allowed at {}", self.0)) }
    }

    fn forced(&mut self) -> Vec<u32> {
        if self.0.is_multiple_of(3) { vec![10] } else { Vec::new() }
    }

    fn is_complete(&mut self) -> bool {
        self.0 == 45
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Number of kinds of requests.
const KINDS: u32 = 16;

/// Requests of all kinds. Few different tokens come again in the same order now and then, so that some drafts are right and some are not.
fn request(i: u32) -> Request {
    let bias = vec![(10, 60.0), (20, 60.0), (30, 60.0)];
    let likely = Sampling { logit_bias: bias, ..Sampling::greedy() };
    let seeded = Sampling { temperature: 0.8, seed: Some(u64::from(i)), ..likely.clone() };
    let stop = StopRule { ignore_end: true, ..StopRule::default() };
    let prompt = repeating(40 + i * 5, i);
    let of =
        |sampling: Sampling| Request { limit: Some(70), sampling, stop: stop.clone(), ..Request::new(prompt.clone()) };
    let request = of(likely.clone());
    match i % KINDS {
        1 => of(seeded),
        2 => of(Sampling { frequency_penalty: 0.3, ..likely }),
        3 => Request { logprobs: Some(2), choices: 2, sampling: seeded, ..request },
        4 => Request { limit: Some(3), ..request },
        5 => of(Sampling { temperature: 1.2, top_k: 20, top_p: 0.9, min_p: 0.02, ..seeded }),
        6 => of(Sampling { mirostat: 2, ..seeded }),
        7 => of(Sampling { repeat_penalty: 1.1, presence_penalty: 0.2, repeat_last_n: 24, ..seeded }),
        8 => of(Sampling { dry_multiplier: 0.8, dry_base: 1.5, dry_allowed_length: 3, ..seeded }),
        9 => of(Sampling { xtc_probability: 0.5, xtc_threshold: 0.1, ..seeded }),
        10 => Request { constraint: Some(Box::new(Residues(0))), sampling: seeded, ..request },
        11 => Request { constraint: Some(Box::new(Residues(0))), logprobs: Some(1), ..request },
        12 => {
            let strings = vec!["\n\u{14}\u{1e}".to_owned(), "\u{1e}\n\u{14}".to_owned()];
            Request { stop: StopRule { strings, ..stop.clone() }, ..of(seeded) }
        }
        13 => Request { stop: StopRule { tokens: vec![30], min_tokens: 20, ..StopRule::default() }, ..request },
        // Up to the end of the context.
        14 => Request { limit: None, prompt: repeating(150, i), ..request },
        15 => Request { after_sampling: true, logprobs: Some(3), sampling: Sampling { top_k: 3, ..seeded }, ..request },
        _ => request,
    }
}

/// What is told of one text.
#[derive(Debug, Default)]
struct Told {
    tokens: Vec<u32>,
    text: String,
    logprobs: Vec<f32>,
    end: Option<EndReason>,
}

impl PartialEq for Told {
    fn eq(&self, other: &Told) -> bool {
        let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-3;
        let logprobs =
            self.logprobs.len() == other.logprobs.len() && self.logprobs.iter().zip(&other.logprobs).all(near);
        (&self.tokens, &self.text, &self.end) == (&other.tokens, &other.text, &other.end) && logprobs
    }
}

fn collect(events: Events, choices: usize) -> Vec<(Told, Usage)> {
    let mut all: Vec<(Told, Usage)> = (0..choices).map(|_| Default::default()).collect();
    for event in events {
        match event {
            Event::Token { choice, token, text, logprobs } => {
                let told = &mut all[choice].0;
                assert!(told.end.is_none(), "a token after the end");
                told.tokens.push(token);
                told.text += &text;
                told.logprobs.extend(logprobs.map(|of| of.logprob));
            }
            Event::End { choice, text, reason, usage } => {
                let (told, counted) = &mut all[choice];
                told.text += &text;
                (told.end, *counted) = (Some(reason), usage);
            }
            Event::Failed(error) => panic!("{error}"),
            Event::Started { .. } | Event::Read { .. } => {}
        }
    }
    all
}

/// What came of all requests, and how many tokens were drafted and accepted.
struct Outcome {
    told: Vec<Told>,
    drafted: usize,
    accepted: usize,
}

fn run(setup: Setup<'_>, requests: &mut dyn Iterator<Item = Request>) -> Outcome {
    let together = setup.together;
    let scheduler = setup.start();
    let mut requests: Vec<Request> = requests.collect();
    let mut told = Vec::new();
    while !requests.is_empty() {
        let some: Vec<Request> = requests.drain(..together.min(requests.len())).collect();
        let events: Vec<_> = some.into_iter().map(|request| (request.choices, scheduler.generate(request))).collect();
        events.into_iter().for_each(|(choices, events)| told.extend(collect(events, choices)));
    }
    let pages = scheduler.with_engine(|engine| engine.pages()).unwrap();
    assert_eq!(pages.0, pages.1, "every page came back");
    let sum = |of: fn(&Usage) -> usize| told.iter().map(|(_, usage)| of(usage)).sum::<usize>();
    let (drafted, accepted) = (sum(|usage| usage.drafted_tokens), sum(|usage| usage.accepted_tokens));
    let drafts = scheduler.load().tally.drafts;
    assert_eq!((drafts.drafted, drafts.accepted), (drafted as u64, accepted as u64));
    assert_eq!(drafts.accepted_at.iter().sum::<u64>(), drafts.accepted);
    Outcome { told: told.into_iter().map(|(told, _)| told).collect(), drafted, accepted }
}

#[track_caller]
fn assert_same(got: &Outcome, want: &Outcome, what: &str) {
    for (nth, (got, want)) in got.told.iter().zip(&want.told).enumerate() {
        assert_eq!(got, want, "{what}: text {nth}");
    }
    assert_eq!(got.told.len(), want.told.len());
    assert!(got.drafted > got.accepted, "{what}: some of {} drafted tokens should have been wrong", got.drafted);
    assert!(got.accepted > 5, "{what}: {} of {} drafted tokens were accepted", got.accepted, got.drafted);
    println!("{what}: {} of {} drafted tokens were accepted", got.accepted, got.drafted);
}

/// Every preset with something of its own: windows, latent attention, experts, and states beside attention and alone.
const PRESETS: [&str; 8] = [
    "tiny-llama",
    "tiny-gemma2",
    "tiny-gpt-oss",
    "tiny-deepseek2",
    "tiny-qwen3moe",
    "tiny-mamba2",
    "tiny-qwen3next",
    "tiny-rwkv7",
];

#[test]
fn lookup_changes_nothing_for_any_request() {
    let model = Arc::new(model("tiny-llama", 11));
    for together in [1, 8] {
        let want = run(Setup::new(&model, cpu(), together), &mut (0..2 * KINDS).map(request));
        assert_eq!(want.drafted - want.accepted, 0, "a rule alone drafts, and is right");
        let ends = |of: fn(&EndReason) -> bool| want.told.iter().any(|told| told.end.as_ref().is_some_and(of));
        assert!(ends(|end| matches!(end, EndReason::StopString(_))), "a stop string");
        assert!(ends(|end| matches!(end, EndReason::StopToken(_))) && ends(|end| *end == EndReason::Context));
        assert!(ends(|end| *end == EndReason::Complete) && ends(|end| *end == EndReason::Limit));
        let got = run(Setup::new(&model, cpu(), together).looking_up(), &mut (0..2 * KINDS).map(request));
        assert_same(&got, &want, &format!("{together} at once"));
    }
}

#[test]
fn lookup_changes_nothing_for_any_model() {
    for preset in PRESETS {
        let model = Arc::new(model(preset, 11));
        for together in [1, 4] {
            let want = run(Setup::new(&model, cpu(), together), &mut (0..8).map(request));
            let got = run(Setup::new(&model, cpu(), together).looking_up(), &mut (0..8).map(request));
            assert_same(&got, &want, &format!("{preset}, {together} at once"));
        }
    }
}

#[test]
fn lookup_changes_no_bit_of_reproducible_text() {
    let reproducible = || Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(true));
    for preset in ["tiny-llama", "tiny-qwen3next"] {
        let model = Arc::new(model(preset, 3));
        let want = run(Setup::new(&model, reproducible(), 1), &mut (0..KINDS).map(request));
        let got = run(Setup::new(&model, reproducible(), 8).looking_up(), &mut (0..KINDS).map(request));
        assert_same(&got, &want, preset);
    }
}

#[test]
fn lookup_changes_nothing_after_prefix_hits_and_swaps() {
    for preset in ["tiny-llama", "tiny-gemma2", "tiny-qwen3next"] {
        let model = Arc::new(model(preset, 7));
        let kinds = || (0..6).map(|i| Request { choices: 1, ..request(i) });
        let want = run(Setup::new(&model, cpu(), 1), &mut kinds().chain(kinds()));
        // The second half finds its prompts; six sequences that grow to three pages have ten.
        let few = Setup { pages: 10, ..Setup::new(&model, cpu(), 6).looking_up() };
        let got = run(few, &mut kinds().chain(kinds()));
        assert_same(&got, &want, preset);
    }
}

#[test]
fn drafts_change_nothing_on_a_gpu() {
    let gpu = || gpu_with(Options::default());
    for preset in ["tiny-llama", "tiny-qwen3next"] {
        let model = Arc::new(model(preset, 11));
        let requests = || [0, 1, 2, 5, 10].into_iter().map(request);
        let (Some((plain, _a)), Some((with, _b)), Some((modelled, _c))) = (gpu(), gpu(), gpu()) else { return };
        let want = run(Setup::new(&model, plain, 2), &mut requests());
        assert_same(&run(Setup::new(&model, with, 2).looking_up(), &mut requests()), &want, preset);
        let got = run(Setup::new(&model, modelled, 2).with_draft(&model), &mut requests());
        assert_eq!(got.told, want.told);
        assert!(10 * got.accepted > 5 * got.drafted, "{preset}: {} of {}", got.accepted, got.drafted);
    }
}

/// A model drafts for itself, and another one with the same shape and other weights does.
fn models_draft(presets: &[&str]) {
    for preset in presets {
        let target = Arc::new(model(preset, 11));
        // A state alone has no context that could be full.
        let up_to_its_end = target.facts.has_cache().then_some(14);
        let kinds = || [0, 1, 2, 3, 5, 12].into_iter().chain(up_to_its_end).map(request);
        let want = run(Setup::new(&target, cpu(), 1), &mut kinds());
        let got = run(Setup::new(&target, cpu(), 1).with_draft(&target), &mut kinds());
        assert_eq!(got.told, want.told, "{preset}");
        // Greedy text and drawn text alike: the draft draws with the noise of the sequence. Penalties it does not know.
        let counts = format!("{preset}: {} of {} drafted tokens were accepted", got.accepted, got.drafted);
        assert!(got.accepted > 250 && 10 * got.accepted > 7 * got.drafted, "{counts}");
        println!("{counts}");
        let other = Arc::new(model(preset, 12));
        let got = run(Setup::new(&target, cpu(), 4).with_draft(&other), &mut kinds());
        assert_same(&got, &want, &format!("{preset}, 4 at once, wrong weights"));
    }
}

#[test]
fn a_model_that_drafts_for_itself_is_right_and_another_one_only_costs_time() {
    models_draft(&PRESETS[..5]);
}

#[test]
fn a_model_with_states_drafts_for_itself() {
    models_draft(&PRESETS[5..]);
}

#[test]
fn a_draft_model_of_another_architecture_drafts_with_lookup_beside_it() {
    let (target, draft) = (Arc::new(model("tiny-llama", 11)), Arc::new(model("tiny-mamba2", 1)));
    let want = run(Setup::new(&target, cpu(), 1), &mut (0..KINDS).map(request));
    let got = run(Setup::new(&target, cpu(), 8).with_draft(&draft).looking_up(), &mut (0..KINDS).map(request));
    assert_same(&got, &want, "a state drafts for attention");
    // A cache for half of the prompts, and pages for two sequences.
    let mut few = Setup::new(&target, cpu(), 8).with_draft(&target);
    let room = room(&target, 8, 5, 128, 32);
    let engine = Engine::new(Arc::clone(&target), cpu(), room, &mut |_, _| {}).unwrap();
    few.draft = Some(DraftModel::new(engine, &target).unwrap());
    let got = run(few, &mut (0..KINDS).map(request));
    assert_eq!(got.told, want.told);
    assert!(got.accepted > 100, "{} of {}", got.accepted, got.drafted);
}

#[test]
fn drafts_keep_to_their_limits() {
    let target = Arc::new(model("tiny-llama", 11));
    let kinds = || [0, 1].into_iter().map(request);
    let want = run(Setup::new(&target, cpu(), 1), &mut kinds());
    let with = |limits: DraftLimits| {
        let mut setup = Setup::new(&target, cpu(), 1).with_draft(&target);
        setup.policy.draft = DraftLimits { always: true, ..limits };
        run(setup, &mut kinds())
    };
    let none = with(DraftLimits { most: 0, ..DraftLimits::default() });
    assert_eq!((none.drafted, &none.told), (0, &want.told));
    let refusing = Request { most_drafted: 0, ..request(0) };
    let looking_up = Setup::new(&target, cpu(), 1).with_draft(&target).looking_up();
    assert_eq!(run(looking_up, &mut std::iter::once(refusing)).drafted, 0);
    // No token is so probable, so no draft is as long as wanted.
    let sure = DraftLimits { least_probability: 1.1, ..DraftLimits::default() };
    assert_eq!(with(sure).drafted, 0);
    let short = with(DraftLimits { most: 2, least: 3, ..DraftLimits::default() });
    assert_eq!((short.drafted, &short.told), (0, &want.told));
    // Logits come back to the host here, and the draws are the same.
    let likely = with(DraftLimits { most: 4, least_probability: 1e-6, ..DraftLimits::default() });
    assert_eq!(likely.told, want.told);
    assert!(
        likely.accepted > 80 && 10 * likely.accepted > 8 * likely.drafted,
        "{} of {}",
        likely.accepted,
        likely.drafted
    );
}

#[test]
fn a_prediction_is_a_draft() {
    let target = Arc::new(model("tiny-llama", 11));
    let plain =
        || Request { sampling: Sampling { temperature: 0.8, seed: Some(5), ..Sampling::default() }, ..request(0) };
    let want = run(Setup::new(&target, cpu(), 1), &mut std::iter::once(plain()));
    let mut changed = want.told[0].tokens.clone();
    changed[30] = (changed[30] + 1) % 200;
    for (prediction, least) in [(want.told[0].tokens.clone(), 60), (changed, 45), (vec![1, 2, 3], 0), (vec![], 0)] {
        let predicted = Request { prediction: Some(prediction), ..plain() };
        let mut setup = Setup::new(&target, cpu(), 1);
        setup.policy.draft.always = true;
        let scheduler = setup.start();
        let (told, usage) = collect(scheduler.generate(predicted), 1).remove(0);
        assert_eq!(told, want.told[0]);
        assert_eq!(
            (usage.predicted_tokens, usage.accepted_predicted_tokens),
            (usage.drafted_tokens, usage.accepted_tokens)
        );
        assert!(usage.accepted_tokens >= least, "{} of {}", usage.accepted_tokens, usage.drafted_tokens);
    }
}

/// An adapter of the first layer's gate, of rank 1.
fn adapter() -> Gguf {
    let mut metadata = Metadata::new();
    metadata.set("general.type", "adapter");
    metadata.set("general.architecture", "llama");
    metadata.set("adapter.type", "lora");
    metadata.set("adapter.lora.alpha", Value::F32(4.0));
    let plain = model("tiny-llama", 11);
    let info = plain.gguf.find("blk.0.ffn_gate.weight").unwrap();
    let [input, output, ..] = info.shape;
    let values = |n: usize| (0..n).flat_map(|i| ((i % 7) as f32 * 0.3 - 0.9).to_le_bytes()).collect::<Vec<u8>>();
    let mut writer = Writer::new(metadata);
    writer.add("blk.0.ffn_gate.weight.lora_a", &[input, 1], TensorType::F32, values(input)).unwrap();
    writer.add("blk.0.ffn_gate.weight.lora_b", &[1, output], TensorType::F32, values(output)).unwrap();
    Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()
}

#[test]
fn adapters_that_count_differently_for_each_text_are_heeded_by_drafts() {
    let plain = model("tiny-llama", 11);
    let adapters = vec![Adapter::new(&adapter(), "adapter.gguf", 1.0, &plain).unwrap()];
    let model = Arc::new(plain.with_adapters(adapters).unwrap());
    let scaled = |i: u32| Request { scales: Some(vec![i as f32 * 0.5]), ..request(i) };
    let want = run(Setup::new(&model, cpu(), 1), &mut (0..4).map(scaled));
    let got = run(Setup::new(&model, cpu(), 4).looking_up(), &mut (0..4).map(scaled));
    assert_same(&got, &want, "adapters");
    assert_ne!(want.told[0].tokens, run(Setup::new(&model, cpu(), 1), &mut std::iter::once(request(0))).told[0].tokens);
}

#[test]
fn a_draft_model_that_does_not_fit_is_refused_with_the_first_difference() {
    let target = model("tiny-llama", 1);
    let why = |draft: &str| DraftModel::check(&model(draft, 1), &target).unwrap_err().to_string();
    let rwkv = why("tiny-rwkv7");
    assert!(rwkv.contains("token") && rwkv.contains("draft model of the same family"), "{rwkv}");
    let bert = why("bert-tiny");
    assert!(bert.contains("gives vectors of texts"), "{bert}");
    assert!(DraftModel::check(&model("tiny-qwen2", 2), &target).is_ok());
    let encoder = DraftModel::check(&target, &model("bert-tiny", 1)).unwrap_err().to_string();
    assert!(encoder.contains("the model itself gives vectors"), "{encoder}");
}

/// Models with a head that is right for the most part: attention alone, and states.
const WITH_HEADS: [&str; 2] = ["glm4moe-shared-1", "qwen35-1"];

/// The model of a golden with its head, and without.
fn with_and_without(name: &str, weights: Weights) -> [Arc<Model>; 2] {
    let golden = golden(name);
    let without = heads_of_files::plain(&golden, &weights);
    assert!(!without.facts.drafts);
    let with = heads_of_files::model(&golden, &weights);
    assert!(with.facts.drafts);
    [with, without].map(Arc::new)
}

#[test]
fn a_head_changes_nothing_and_is_right_or_only_costs_time() {
    for name in WITH_HEADS {
        let right = Weights::of_file(name).nearly_right();
        let [with, without] = with_and_without(name, right);
        let kinds = || (0..KINDS).filter(|i| *i != 11).map(request);
        let want = run(Setup::new(&without, cpu(), 1), &mut kinds());
        let rate = |got: &Outcome| got.accepted as f64 / got.drafted as f64;
        let mut of_right = f64::INFINITY;
        for together in [1, 4] {
            let got = run(Setup::new(&with, cpu(), together).with_head(), &mut kinds());
            assert_same(&got, &want, &format!("{name}, {together} at once"));
            of_right = of_right.min(rate(&got));
        }
        // One that was not asked for drafts nothing.
        let few = || [0, 2].into_iter().map(request);
        let off = Setup {
            policy: Policy { heads: Heads::Off, lookup: Lookup::Off, ..Policy::default() },
            ..Setup::new(&with, cpu(), 2)
        };
        let off = run(off, &mut few());
        assert_eq!((off.drafted, off.told), (0, run(Setup::new(&without, cpu(), 1), &mut few()).told));
        let [wrong, without] = with_and_without(name, Weights::of_file(name));
        let kinds = || [0, 1, 2, 5, 7].into_iter().map(request);
        let want = run(Setup::new(&without, cpu(), 1), &mut kinds());
        let got = run(Setup::new(&wrong, cpu(), 4).with_head(), &mut kinds());
        assert_same(&got, &want, &format!("{name}, wrong weights"));
        assert!(of_right > 0.5 && of_right > 1.2 * rate(&got), "{name}: {of_right:.2} against {:.2}", rate(&got));
    }
}

#[test]
fn a_head_changes_no_bit_of_reproducible_text() {
    let reproducible = || Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(true));
    for name in WITH_HEADS {
        let [with, without] = with_and_without(name, Weights::of_file(name).nearly_right());
        let kinds = || [0, 1, 3, 5, 7].into_iter().map(request);
        let want = run(Setup::new(&without, reproducible(), 1), &mut kinds());
        let got = run(Setup::new(&with, reproducible(), 5).with_head(), &mut kinds());
        assert_same(&got, &want, name);
        assert!(10 * got.accepted > 4 * got.drafted, "{name}: {} of {}", got.accepted, got.drafted);
    }
}

#[test]
fn a_head_changes_nothing_after_prefix_hits_and_swaps() {
    for name in WITH_HEADS {
        let [with, without] = with_and_without(name, Weights::of_file(name).nearly_right());
        let kinds = || (0..6).map(|i| Request { choices: 1, ..request(i) });
        let want = run(Setup::new(&without, cpu(), 1), &mut kinds().chain(kinds()));
        // The second half finds its prompts; six sequences that grow to three pages have ten.
        let few = Setup { pages: 10, ..Setup::new(&with, cpu(), 6).with_head().looking_up() };
        let got = run(few, &mut kinds().chain(kinds()));
        assert_same(&got, &want, name);
    }
}

#[test]
fn a_head_changes_nothing_on_a_gpu() {
    for name in WITH_HEADS {
        let [with, without] = with_and_without(name, Weights::of_file(name).nearly_right());
        let kinds = || [0, 1, 2, 5].into_iter().map(request);
        let (Some((plain, _a)), Some((drafting, _b))) = (gpu_with(Options::default()), gpu_with(Options::default()))
        else {
            return;
        };
        let want = run(Setup::new(&without, plain, 2), &mut kinds());
        let got = run(Setup::new(&with, drafting, 2).with_head(), &mut kinds());
        assert_same(&got, &want, name);
        assert!(10 * got.accepted > 4 * got.drafted, "{name}: {} of {}", got.accepted, got.drafted);
    }
}

#[test]
fn a_head_keeps_to_its_limits() {
    let [with, _] = with_and_without(WITH_HEADS[0], Weights::of_file(WITH_HEADS[0]).nearly_right());
    let of = |limits: DraftLimits| {
        let mut setup = Setup::new(&with, cpu(), 1).with_head();
        setup.policy.draft = DraftLimits { always: true, ..limits };
        run(setup, &mut [0, 1].into_iter().map(request))
    };
    let likely = of(DraftLimits { most: 4, least_probability: 1e-6, ..DraftLimits::default() });
    assert!(likely.accepted > 40, "{} of {}", likely.accepted, likely.drafted);
    let sure = of(DraftLimits { least_probability: 1.1, ..DraftLimits::default() });
    assert_eq!((sure.drafted, &sure.told), (0, &likely.told));
    let short = of(DraftLimits { most: 2, least: 3, ..DraftLimits::default() });
    assert_eq!((short.drafted, &short.told), (0, &likely.told));
}
