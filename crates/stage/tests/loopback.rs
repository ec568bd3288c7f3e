//! Leaders and stages over gRPC on the loopback interface: with certificates and without, lost ones, ones that hang, ones that come back.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_engine::arch::{BatchShape, Room};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, PipelineExecutor, StageHost};
use kiln_engine::model::Model;
use kiln_engine::placement::Placement;
use kiln_engine::plan::Plan;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Event, Policy, Request, Scheduler, StopRule};
use kiln_engine::sampler::Sampling;
use kiln_engine::state::of_model;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::Gguf;
use kiln_stage::{Error, Keys, Listening, Stage, StageAddress, read_up};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

const LAYERS: usize = 3;

fn model() -> Arc<Model> {
    let preset = Preset { layers: LAYERS, ..*Preset::from_name("tiny-llama").unwrap() };
    let synth = Synth::new(&preset, Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

fn host(model: &Arc<Model>) -> StageHost {
    StageHost::new(Arc::clone(model), Box::new(|_| Ok(cpu()))).unwrap()
}

fn listen(model: &Arc<Model>, address: &str, keys: Option<Keys>) -> Listening {
    Stage::listen(address, keys, host(model)).unwrap()
}

fn placement(devices: usize) -> Placement {
    let layers: Vec<usize> = (0..LAYERS).map(|layer| layer.min(devices - 1)).collect();
    Placement { input: 0, experts: layers.clone(), layers, output: devices - 1, rules: Vec::new() }
}

fn engine(model: &Arc<Model>, stages: &[StageAddress]) -> Result<Engine, kiln_engine::Error> {
    let mut devices = vec![cpu()];
    for stage in stages {
        let joined = stage.executor(of_model(model)).map_err(|why| kiln_engine::Error::Run { why: why.to_string() })?;
        devices.push(Box::new(joined));
    }
    let graph = model.graph(&Room::one(64))?;
    let plans: Vec<Plan> = [1, 9].map(|tokens| graph.plan(BatchShape::new(tokens, 1)).unwrap()).into();
    let placement = placement(devices.len());
    let executor: Box<dyn Executor> = match devices.len() {
        1 => devices.remove(0),
        _ => Box::new(PipelineExecutor::new(devices, placement, &plans).without_streaming()),
    };
    Engine::new(Arc::clone(model), executor, Room::for_sequences(2, 512), &mut |_, _| {})
}

fn request(tokens: usize) -> Request {
    let prompt = (0..40u32).map(|i| (i * i * 7 + i * 37 + 11) % 256).collect();
    let stop = StopRule { ignore_end: true, ..StopRule::default() };
    Request { limit: Some(tokens), sampling: Sampling::greedy(), stop, ..Request::new(prompt) }
}

fn write(scheduler: &Scheduler, tokens: usize) -> Result<Vec<u32>, String> {
    let token = |event| match event {
        Event::Token { token, .. } => Some(Ok(token)),
        Event::Failed(why) => Some(Err(why.to_string())),
        _ => None,
    };
    scheduler.generate(request(tokens)).filter_map(token).collect()
}

/// An authority, and what hosts get from it.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn keys(&self) -> Keys {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Keys {
            certificate: certificate.pem().into_bytes(),
            key: key.serialize_pem().into_bytes(),
            authority: self.0.pem().into_bytes(),
        }
    }
}

fn address(stage: &Listening, keys: Option<Keys>) -> StageAddress {
    StageAddress::new(&stage.address().to_string(), keys).unwrap()
}

#[test]
fn two_stages_with_certificates_write_what_one_process_writes() {
    let model = model();
    let want = write(&Scheduler::start(engine(&model, &[]).unwrap(), Policy::default()), 30).unwrap();
    assert_eq!(want.len(), 30);
    let authority = Authority::new();
    let stages = [0, 1].map(|_| listen(&model, "127.0.0.1:0", Some(authority.keys())));
    let addresses = [0, 1].map(|at| address(&stages[at], Some(authority.keys())));
    let scheduler = Scheduler::start(engine(&model, &addresses).unwrap(), Policy::default());
    assert_eq!(write(&scheduler, 30).unwrap(), want);
    // A second leader has to wait until the first one has gone.
    let busy = addresses[0].executor(of_model(&model)).err().unwrap().to_string();
    assert!(busy.contains("another leader"), "{busy}");
    drop(scheduler);
    let start = Instant::now();
    while let Err(why) = addresses[0].executor(of_model(&model)) {
        assert!(start.elapsed() < Duration::from_secs(20), "{why}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn only_hosts_of_the_same_authority_come_together() {
    let model = model();
    let (authority, other) = (Authority::new(), Authority::new());
    let stage = listen(&model, "127.0.0.1:0", Some(authority.keys()));
    let join = |keys| address(&stage, keys).executor(of_model(&model)).err().map(|why| why.to_string());
    assert_eq!(join(Some(authority.keys())), None);
    let mixed = Keys { authority: authority.keys().authority, ..other.keys() };
    for (keys, what) in [(None, "no TLS"), (Some(other.keys()), "another authority"), (Some(mixed), "a stranger's key")]
    {
        let why = join(keys).unwrap_or_else(|| panic!("{what} was let in"));
        assert!(why.contains("cannot reach"), "{what}: {why}");
    }
}

#[test]
fn nothing_leaves_the_machine_without_certificates() {
    let model = model();
    for open in ["0.0.0.0:0", "[::]:0", "192.0.2.1:9100", "host-b:9100"] {
        let why = Stage::listen(open, None, host(&model)).err();
        assert!(matches!(why, Some(Error::Unprotected { .. })), "{open}");
        let why = StageAddress::new(open, None).err();
        assert!(matches!(why, Some(Error::Unproven { .. })), "{open}");
    }
    for wrong in ["localhost", ":1", "localhost:http", ""] {
        assert!(matches!(StageAddress::new(wrong, None), Err(Error::Address { .. })), "{wrong}");
    }
}

#[test]
fn a_lost_stage_is_told_and_joined_again() {
    let model = model();
    let stage = listen(&model, "127.0.0.1:0", None);
    let place = address(&stage, None);
    let (again, of) = (place.clone(), Arc::clone(&model));
    let rebuild = Box::new(move |_| engine(&of, std::slice::from_ref(&again)));
    let first = engine(&model, std::slice::from_ref(&place)).unwrap();
    let scheduler = Scheduler::start_lasting(first, Policy::default(), rebuild);
    let want = write(&scheduler, 20).unwrap();
    let running = scheduler.generate(request(400));
    let mut running = running.skip_while(|event| !matches!(event, Event::Token { .. }));
    running.next().unwrap();
    stage.stop();
    let Some(Event::Failed(why)) = running.last() else { panic!("the text should have broken off") };
    assert!(why.is_lost() && why.to_string().contains(&place.address), "{why}");
    // While it is away, requests are refused with the same reason.
    let refused = write(&scheduler, 20).unwrap_err();
    assert!(refused.contains("lost"), "{refused}");
    assert!(scheduler.load().rebuilding);
    let _back = listen(&model, &place.address, None);
    let start = Instant::now();
    let got = loop {
        match write(&scheduler, 20) {
            Ok(got) => break got,
            Err(why) => assert!(start.elapsed() < Duration::from_secs(60), "{why}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    assert_eq!(got, want);
}

#[test]
fn a_stage_that_says_nothing_is_lost() {
    let model = model();
    // A port that takes connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = StageAddress::new(&silent.local_addr().unwrap().to_string(), None).unwrap();
    let start = Instant::now();
    let why = place.executor(of_model(&model)).err().unwrap().to_string();
    assert!(why.contains("cannot reach") && start.elapsed() < Duration::from_secs(25), "{why}");
}

/// Bytes without a meaning are no messages, and none of them is taken for more than it is.
#[test]
fn bytes_without_a_meaning_are_refused() {
    let count: u32 = std::env::var("KILN_STAGE_FUZZ").ok().and_then(|n| n.parse().ok()).unwrap_or(50_000);
    let mut state = 0x2545_F491_4F6C_DD1Du64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut read = 0u32;
    for _ in 0..count {
        let length = (next() % 48) as usize;
        let mut bytes: Vec<u8> = (0..length).map(|_| next() as u8).collect();
        // A known field and a length that fits, so that some get past the first bytes.
        if length > 2 && next() % 2 == 0 {
            bytes[0] = ((1 + next() % 11) << 3) as u8 | [0, 2][(next() % 2) as usize];
            bytes[1] = if next() % 4 == 0 { bytes[1] } else { (length - 2) as u8 };
        }
        read += u32::from(read_up(&bytes).is_some());
    }
    assert!(read > 0 && read < count / 2, "{read} of {count}");
}
