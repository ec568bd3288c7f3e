//! What Prometheus sees, under the names that dashboards and autoscalers know from vLLM. Times are taken on the engine's
//! thread, where tokens are made, not where they are sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use kiln_engine::run::{EndReason, Event, Load, Request, STEP_SIZES, Scheduler, Tally};
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::adapters::{AdapterUse, InUse, NamedAdapter};

const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const PER_TOKEN: [f64; 22] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
];
const WHOLE: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const TOKENS: [f64; 18] =
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Finished {
    finished_reason: &'static str,
}

/// All metrics.
pub(crate) struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    cache: Gauge<f64, AtomicU64>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
    cache_queries: Counter,
    cache_hits: Counter,
    finished: Family<Finished, Counter>,
    first_token: Histogram,
    between_tokens: Histogram,
    per_token: Histogram,
    whole: Histogram,
    waited: Histogram,
    read: Histogram,
    wrote: Histogram,
    worked: Histogram,
    prompts: Histogram,
    answers: Histogram,
    choices: Histogram,
    limits: Histogram,
    longest: Histogram,
    computed: Histogram,
    by_source: Family<Source, Counter>,
    by_reason: Family<Reason, Gauge>,
    /// Adapters in use, and how many have names.
    adapters: Arc<AdapterUse>,
    named_adapters: AtomicUsize,
    /// Names the model and the engine in what is written by hand.
    labels: String,
    /// Tells how large the cache is, once the model is there.
    room: Family<RoomLabels, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Source {
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoomLabels {
    block_size: u64,
    num_gpu_blocks: u64,
}

impl Metrics {
    pub(crate) fn new(model: &str) -> Metrics {
        let mut all = Registry::default();
        let labels = [("model_name".into(), model.to_owned().into()), ("engine".into(), "0".into())];
        let registry = all.sub_registry_with_labels(labels.into_iter());
        let mut metrics = Metrics {
            registry: Registry::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            cache: Gauge::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            cache_queries: Counter::default(),
            cache_hits: Counter::default(),
            finished: Family::default(),
            first_token: Histogram::new(FIRST_TOKEN),
            between_tokens: Histogram::new(PER_TOKEN),
            per_token: Histogram::new(PER_TOKEN),
            whole: Histogram::new(WHOLE),
            waited: Histogram::new(WHOLE),
            read: Histogram::new(WHOLE),
            wrote: Histogram::new(WHOLE),
            worked: Histogram::new(WHOLE),
            prompts: Histogram::new(TOKENS),
            answers: Histogram::new(TOKENS),
            choices: Histogram::new([1.0, 2.0, 5.0, 10.0, 20.0]),
            limits: Histogram::new(TOKENS),
            longest: Histogram::new(TOKENS),
            computed: Histogram::new(TOKENS),
            by_source: Family::default(),
            by_reason: Family::default(),
            adapters: Arc::default(),
            named_adapters: AtomicUsize::new(0),
            labels: format!("model_name=\"{}\",engine=\"0\"", escaped(model)),
            room: Family::default(),
        };
        let m = &metrics;
        registry.register("vllm:num_requests_running", "Requests that are running", m.running.clone());
        registry.register("vllm:num_requests_waiting", "Requests in the queue", m.waiting.clone());
        registry.register("vllm:kv_cache_usage_perc", "KV cache pages in use, 0 to 1", m.cache.clone());
        registry.register("vllm:prompt_tokens", "Prompt tokens", m.prompt_tokens.clone());
        registry.register(
            "vllm:prompt_tokens_cached",
            "Prompt tokens found in the prefix cache",
            m.cached_tokens.clone(),
        );
        registry.register("vllm:generation_tokens", "Generated tokens", m.generated_tokens.clone());
        registry.register("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", m.cache_queries.clone());
        registry.register("vllm:prefix_cache_hits", "Tokens found in the prefix cache", m.cache_hits.clone());
        registry.register("vllm:request_success", "Finished sequences, by reason", m.finished.clone());
        let seconds = [
            ("vllm:time_to_first_token", "Time to the first token", &m.first_token),
            ("vllm:inter_token_latency", "Inter-token latency", &m.between_tokens),
            ("vllm:request_time_per_output_token", "Mean time per output token of a request", &m.per_token),
            ("vllm:e2e_request_latency", "End-to-end latency of a request", &m.whole),
            ("vllm:request_queue_time", "Time in the queue", &m.waited),
            ("vllm:request_prefill_time", "Prefill time", &m.read),
            ("vllm:request_decode_time", "Decode time", &m.wrote),
            ("vllm:request_inference_time", "Prefill and decode time", &m.worked),
        ];
        for (name, help, histogram) in seconds {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        registry.register("vllm:request_prompt_tokens", "Prompt tokens of a request", m.prompts.clone());
        registry.register("vllm:request_generation_tokens", "Generated tokens of a request", m.answers.clone());
        registry.register("vllm:request_params_n", "Choices per request (n)", m.choices.clone());
        registry.register("vllm:request_params_max_tokens", "Requested max_tokens", m.limits.clone());
        let longest = "Generated tokens of the longest choice of a request";
        registry.register("vllm:request_max_num_generation_tokens", longest, m.longest.clone());
        let computed = "Prompt tokens of a request that were computed, not cached";
        registry.register("vllm:request_prefill_kv_computed_tokens", computed, m.computed.clone());
        let source = "Prompt tokens, by source: computed or cached";
        registry.register("vllm:prompt_tokens_by_source", source, m.by_source.clone());
        let reason = "Queued requests, by reason";
        registry.register("vllm:num_requests_waiting_by_reason", reason, m.by_reason.clone());
        registry.register("vllm:cache_config_info", "Configuration of the KV cache", m.room.clone());
        metrics.registry = all;
        metrics
    }

    /// A model that is loaded with so many adapters that requests pick by name.
    pub(crate) fn model_is_there(&self, scheduler: &Scheduler, named_adapters: usize) {
        self.named_adapters.store(named_adapters, Ordering::Relaxed);
        let pages = scheduler.load().pages;
        let labels = RoomLabels { block_size: kiln_engine::arch::PAGE as u64, num_gpu_blocks: pages as u64 };
        self.room.get_or_create(&labels).set(1);
    }

    /// Counts an embedding request of this many tokens, by outcome.
    pub(crate) fn embedded(&self, tokens: usize, took: std::time::Duration, worked: bool) {
        self.prompt_tokens.inc_by(tokens as u64);
        self.prompts.observe(tokens as f64);
        self.whole.observe(took.as_secs_f64());
        let finished_reason = if worked { "stop" } else { "error" };
        self.finished.get_or_create(&Finished { finished_reason }).inc();
    }

    /// Tokens of prompts, those of them that were cached, and tokens that were made.
    pub(crate) fn tokens(&self) -> [u64; 3] {
        [self.prompt_tokens.get(), self.cached_tokens.get(), self.generated_tokens.get()]
    }

    /// Everything as text. `preparing` counts requests that are not handed to the engine yet.
    pub(crate) fn text(&self, load: Load, in_flight: usize, preparing: usize) -> String {
        let running = load.reading + load.writing + load.swapped;
        self.running.set(running as i64);
        self.waiting.set((load.waiting.max(in_flight.saturating_sub(running)) + preparing) as i64);
        let used = load.pages.saturating_sub(load.free_pages);
        self.cache.set(if load.pages == 0 { 0.0 } else { used as f64 / load.pages as f64 });
        // A request that waits for a shared prefix does not wait for a slot.
        let deferred = load.deferred.min(load.waiting);
        let waiting = |reason| self.by_reason.get_or_create(&Reason { reason }).clone();
        waiting("deferred").set(deferred as i64);
        waiting("capacity").set(self.waiting.get() - deferred as i64);
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.registry);
        let end = text.trim_end().trim_end_matches("# EOF").len();
        text.truncate(end);
        self.steps(&mut text, &load.tally);
        let named = self.named_adapters.load(Ordering::Relaxed);
        if named > 0 {
            self.adapters.tell(&mut text, &self.labels, named);
        }
        text.push_str("# EOF\n");
        text
    }

    /// What the engine counts itself.
    fn steps(&self, text: &mut String, tally: &Tally) {
        let (labels, swaps) = (&self.labels, tally.swaps);
        let name = "vllm:iteration_tokens_total";
        let mut add = |line: String| text.extend([line.as_str(), "\n"]);
        add("# HELP vllm:num_preemptions Preempted sequences".to_owned());
        add("# TYPE vllm:num_preemptions counter".to_owned());
        add(format!("vllm:num_preemptions_total{{{labels}}} {swaps}"));
        add("# HELP kiln:prefix_cache_hit_tokens Tokens of prompts that were found in the cache, by where they were"
            .to_owned());
        add("# TYPE kiln:prefix_cache_hit_tokens counter".to_owned());
        let hits = tally.hits;
        for (tier, tokens) in [("device", hits.device), ("host", hits.host), ("disk", hits.disk)] {
            add(format!("kiln:prefix_cache_hit_tokens_total{{tier=\"{tier}\",{labels}}} {tokens}"));
        }
        for (what, help, tokens) in [
            ("drafts", "Drafts that were verified", tally.drafts.rounds),
            ("draft_tokens", "Drafted tokens", tally.drafts.drafted),
            ("accepted_tokens", "Drafted tokens that were accepted", tally.drafts.accepted),
        ] {
            for server in ["vllm", "llamacpp"] {
                let name = format!("{server}:spec_decode_num_{what}");
                add(format!("# HELP {name} {help}"));
                add(format!("# TYPE {name} counter"));
                add(format!("{name}_total{{{labels}}} {tokens}"));
            }
        }
        let by_place = "vllm:spec_decode_num_accepted_tokens_per_pos";
        add(format!("# HELP {by_place} Drafted tokens that were accepted, by their place in the draft"));
        add(format!("# TYPE {by_place} counter"));
        for (place, tokens) in tally.drafts.accepted_at.iter().enumerate() {
            add(format!("{by_place}_total{{position=\"{place}\",{labels}}} {tokens}"));
        }
        add(format!("# HELP {name} Tokens per engine step"));
        add(format!("# TYPE {name} histogram"));
        let mut seen = 0;
        for (size, steps) in tally.steps.iter().enumerate() {
            seen += steps;
            // vLLM's edges: 1, 8 and on by powers of two; the last entry has no edge.
            if (size == 0 || size >= 3) && size + 1 < STEP_SIZES {
                add(format!("{name}_bucket{{le=\"{}.0\",{labels}}} {seen}", 1u64 << size));
            }
        }
        add(format!("{name}_bucket{{le=\"+Inf\",{labels}}} {seen}"));
        add(format!("{name}_sum{{{labels}}} {}", tally.tokens));
        add(format!("{name}_count{{{labels}}} {seen}"));
    }
}

/// A value of a label.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The texts of several models as one: each metric is described once, and has the samples of all.
pub(crate) fn merged(texts: impl Iterator<Item = String>) -> String {
    let mut metrics: Vec<(String, String)> = Vec::new();
    for text in texts {
        for part in text.trim_end().trim_end_matches("# EOF").split("# HELP ").skip(1) {
            let samples: Vec<&str> = part.lines().filter(|line| !line.starts_with('#')).skip(1).collect();
            let name = part.split(' ').next().unwrap_or_default();
            match metrics.iter_mut().find(|(known, _)| known == name) {
                // What holds of the whole program was told with the first model.
                Some((_, all)) => samples.iter().filter(|line| line.contains("model_name=")).for_each(|line| {
                    all.push_str(line);
                    all.push('\n');
                }),
                None => metrics.push((name.to_owned(), classic(name, part))),
            }
        }
    }
    metrics.into_iter().map(|(_, text)| text).chain(["# EOF\n".to_owned()]).collect()
}

/// A metric as Prometheus' own format has it. OpenMetrics, which the library writes, describes a counter without the end of its samples'
/// names, and has a kind for facts of a program that makes Prometheus refuse everything.
fn classic(name: &str, part: &str) -> String {
    for (kind, end, known) in [("counter", "_total", "counter"), ("info", "_info", "gauge")] {
        let told = format!("# TYPE {name} {kind}\n");
        if part.contains(&told) {
            let rest = part[name.len()..].replacen(&told, &format!("# TYPE {name}{end} {known}\n"), 1);
            return format!("# HELP {name}{end}{rest}");
        }
    }
    format!("# HELP {part}")
}

/// Why a text ended, in the words of vLLM's metrics.
pub(crate) fn finish_reason(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::Limit | EndReason::Context => "length",
        EndReason::Cancelled => "abort",
        _ => "stop",
    }
}

/// Sees the events of one request on the engine's thread.
pub(crate) struct Watch {
    metrics: Arc<Metrics>,
    came: Instant,
    last: Vec<Option<Instant>>,
    first_seen: bool,
    prompt: usize,
    reuse: bool,
    /// Sequences still running, and tokens of the longest finished one.
    open: usize,
    longest: usize,
    adapter: Option<InUse>,
}

impl Watch {
    pub(crate) fn new(metrics: &Arc<Metrics>, request: &Request, adapter: Option<&NamedAdapter>) -> Watch {
        metrics.choices.observe(request.choices as f64);
        if let Some(limit) = request.limit {
            metrics.limits.observe(limit as f64);
        }
        Watch {
            metrics: Arc::clone(metrics),
            came: Instant::now(),
            last: vec![None; request.choices],
            first_seen: false,
            prompt: request.prompt.len(),
            reuse: request.reuse,
            open: request.choices,
            longest: 0,
            adapter: adapter.map(|adapter| metrics.adapters.begin(&adapter.name)),
        }
    }

    pub(crate) fn see(&mut self, event: &Event) {
        let metrics = &self.metrics;
        match event {
            Event::Started { cached_tokens } => {
                self.adapter.iter_mut().for_each(InUse::run);
                let cached = *cached_tokens as u64;
                metrics.prompt_tokens.inc_by(self.prompt as u64);
                metrics.cached_tokens.inc_by(cached);
                metrics.cache_hits.inc_by(cached);
                metrics.cache_queries.inc_by(if self.reuse { self.prompt as u64 } else { 0 });
                metrics.prompts.observe(self.prompt as f64);
                let computed = self.prompt as u64 - cached.min(self.prompt as u64);
                metrics.computed.observe(computed as f64);
                let of = |source| metrics.by_source.get_or_create(&Source { source }).clone();
                of("local_compute").inc_by(computed);
                of("local_cache_hit").inc_by(cached);
            }
            Event::Token { choice, .. } => {
                let now = Instant::now();
                metrics.generated_tokens.inc();
                if !self.first_seen {
                    self.first_seen = true;
                    metrics.first_token.observe((now - self.came).as_secs_f64());
                }
                if let Some(before) = self.last.get_mut(*choice).and_then(|last| last.replace(now)) {
                    metrics.between_tokens.observe((now - before).as_secs_f64());
                }
            }
            Event::End { reason, usage, .. } => {
                let finished_reason = finish_reason(reason);
                metrics.finished.get_or_create(&Finished { finished_reason }).inc();
                metrics.whole.observe(self.came.elapsed().as_secs_f64());
                metrics.waited.observe(usage.waiting.as_secs_f64());
                metrics.read.observe(usage.reading.as_secs_f64());
                metrics.wrote.observe(usage.writing.as_secs_f64());
                metrics.worked.observe((usage.reading + usage.writing).as_secs_f64());
                metrics.answers.observe(usage.generated_tokens as f64);
                (self.open, self.longest) = (self.open.saturating_sub(1), self.longest.max(usage.generated_tokens));
                if self.open == 0 {
                    metrics.longest.observe(self.longest as f64);
                }
                if usage.generated_tokens > 1 {
                    let tokens = (usage.generated_tokens - 1) as f64;
                    metrics.per_token.observe(usage.writing.as_secs_f64() / tokens);
                }
            }
            Event::Failed(_) => {
                metrics.finished.get_or_create(&Finished { finished_reason: "error" }).inc();
            }
            Event::Read { .. } => {}
        }
    }
}
