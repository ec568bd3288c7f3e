//! The sampler as a whole: distributions, order, masks, and that a draw can be repeated.

use proptest::prelude::*;

use super::*;

fn sampler(sampling: Sampling, n_vocab: usize) -> Sampler {
    Sampler::new(Sampling { seed: Some(7), ..sampling }, n_vocab, None).expect("the settings should be valid")
}

/// No sampler at all.
fn plain() -> Sampling {
    Sampling { samplers: Vec::new(), ..Sampling::default() }
}

/// How often each token is drawn.
fn frequencies(sampling: Sampling, logits: &[f32], draws: usize) -> Vec<f64> {
    let mut sampler = sampler(sampling, logits.len());
    let mut counts = vec![0.0; logits.len()];
    for _ in 0..draws {
        let token = sampler.sample(logits, Step::default()).expect("a draw should succeed").token;
        counts[token as usize] += 1.0 / draws as f64;
        // The position moves on; without penalties the token itself does not matter.
        sampler.accept(0);
    }
    counts
}

fn assert_close(got: &[f64], want: &[f64]) {
    // 20,000 draws: a standard deviation is at most 0.0036.
    for (got_one, want_one) in got.iter().zip(want) {
        assert!((got_one - want_one).abs() < 0.016, "{got:?} should be {want:?}");
    }
}

#[test]
fn the_largest_wins_and_the_first_of_equals() {
    assert_eq!(greedy(&[-3.0, -1.0, -2.0, -1.0], &[]), Some(1));
    assert_eq!(greedy(&[-3.0, -1.0, -2.0, -1.0], &[1, 3]), Some(2));
    assert_eq!(greedy(&[1.0], &[0]), None);
    assert_eq!(greedy(&[f32::NEG_INFINITY, f32::NEG_INFINITY], &[]), Some(0));
    assert_eq!(greedy(&[0.0, f32::NAN], &[]), None);
    assert_eq!(greedy(&[], &[]), None);
}

#[test]
fn the_draw_follows_the_probabilities() {
    let p = [0.1, 0.2, 0.3, 0.4];
    let logits = p.map(|p: f64| p.ln() as f32);
    assert_close(&frequencies(plain(), &logits, 20_000), &p);
    // Twice the temperature takes the square root.
    let roots = p.map(f64::sqrt);
    let sum: f64 = roots.iter().sum();
    let hot = Sampling { temperature: 2.0, samplers: vec![Kind::Temperature], ..Sampling::default() };
    assert_close(&frequencies(hot, &logits, 20_000), &roots.map(|root| root / sum));
    let top_two = Sampling { top_k: 2, samplers: vec![Kind::TopK], ..Sampling::default() };
    assert_close(&frequencies(top_two, &logits, 20_000), &[0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]);
}

#[test]
fn xtc_happens_as_often_as_asked() {
    let p = [0.4, 0.6];
    let logits = p.map(|p: f64| p.ln() as f32);
    let sampling = Sampling { xtc_probability: 0.5, samplers: vec![Kind::Xtc], ..Sampling::default() };
    // Half of the draws are from both, the other half take the less likely one.
    assert_close(&frequencies(sampling, &logits, 20_000), &[0.5 * 0.4 + 0.5, 0.5 * 0.6]);
}

#[test]
fn mirostat_steers_the_surprise() {
    let n = 1000;
    // A long tail, as Zipf's law has it.
    let logits: Vec<f32> = (0..n).map(|rank| -((rank + 1) as f32).ln()).collect();
    let sampling = Sampling { mirostat: 2, temperature: 1.0, ..Sampling::default() };
    for tau in [2.0, 4.0] {
        let mut sampler = sampler(Sampling { mirostat_tau: tau, ..sampling.clone() }, n);
        let mut bits = 0.0;
        let draws = 4000;
        for _ in 0..draws {
            let before = sampler.mirostat.expect("mirostat is on");
            let mut left = sampler.candidates(&logits, None).expect("all are there");
            before.truncate(&mut left);
            let token = sampler.sample(&logits, Step::default()).expect("a draw should succeed").token;
            let place = left.items().iter().position(|item| item.id == token).expect("it is among those left");
            bits -= left.probabilities()[place].log2() / f64::from(draws);
            sampler.accept(token);
        }
        assert!((bits - f64::from(tau)).abs() < 0.1, "{bits} bits should be {tau}");
    }
}

#[test]
fn zero_temperature_is_greedy_wherever_it_stands() {
    let logits = [0.3, 2.0, 1.9, -4.0];
    for order in ["temperature", "temperature;top_k", "top_p;temperature;min_p"] {
        let samplers = Kind::parse_names(order).expect("these exist");
        let sampling = Sampling { samplers, ..Sampling::greedy() };
        assert!(sampling.is_greedy());
        let mut sampler = sampler(sampling, 4);
        for _ in 0..50 {
            assert_eq!(sampler.sample(&logits, Step::default()).expect("a draw should succeed").token, 1);
            sampler.accept(1);
        }
    }
}

#[test]
fn the_draw_is_the_one_that_a_gpu_makes() {
    use kiln_kernels::sample::gumbel;
    let logits: Vec<f32> = (0..50).map(|id| (id as f32 * 0.7).sin() * 3.0).collect();
    let mut sampler = sampler(Sampling { top_k: 20, top_p: 1.0, min_p: 0.0, ..Sampling::default() }, 50);
    let mut order: Vec<usize> = (0..50).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    // A device counts from the position of the last token.
    sampler.prompt(&[0]);
    for position in 0..200 {
        let key = |id: usize| score(logits[id], 0.8, gumbel(7, position, id as u32));
        let want = order[..20].iter().copied().max_by(|&a, &b| key(a).total_cmp(&key(b))).expect("20 are left");
        assert_eq!(sampler.sample(&logits, Step::default()).expect("a draw should succeed").token, want as u32);
        sampler.accept(0);
    }
}

#[test]
fn names_and_letters_say_the_same() {
    let names = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature";
    assert_eq!(Kind::parse_names(names).expect("the defaults exist"), Kind::DEFAULT_ORDER);
    assert_eq!(Kind::parse_letters("edskypmxt").expect("the defaults exist"), Kind::DEFAULT_ORDER);
    let letters: String = Kind::DEFAULT_ORDER.iter().map(|kind| kind.letter()).collect();
    assert_eq!(letters, "edskypmxt");
    for kind in Kind::DEFAULT_ORDER {
        assert_eq!(Kind::from_name(kind.name()).expect("its own name"), kind);
    }
    assert_eq!(
        Kind::parse_names("top-k; TEMP;nucleus").expect("other names"),
        [Kind::TopK, Kind::Temperature, Kind::TopP]
    );
    assert!(Kind::parse_names("top_q").expect_err("unknown").to_string().contains("top_q"));
    assert!(Kind::parse_letters("kz").expect_err("unknown").to_string().contains('z'));
}

#[test]
fn the_defaults_run_on_a_gpu_and_others_say_why_not() {
    assert!(Sampling::default().on_device());
    assert!(Sampling::greedy().on_device());
    let with = |change: fn(&mut Sampling)| {
        let mut sampling = Sampling::default();
        change(&mut sampling);
        sampling.host_reasons()
    };
    assert_eq!(with(|s| s.dry_multiplier = 0.8), ["dry"]);
    assert_eq!(with(|s| s.xtc_probability = 0.5), ["xtc"]);
    assert_eq!(with(|s| s.top_n_sigma = 1.0), ["top_n_sigma"]);
    assert_eq!(with(|s| s.dynatemp_range = 0.2), ["dynatemp_range"]);
    assert_eq!(with(|s| s.mirostat = 2), ["mirostat"]);
    assert_eq!(with(|s| s.samplers.reverse()), ["samplers (their order)"]);
    assert!(with(|s| s.samplers.truncate(4)).is_empty());
}

#[test]
fn settings_are_json_under_known_names() {
    let sampling: Sampling = serde_json::from_str(
        r#"{"temp": 0.5, "typical_p": 0.9, "repetition_penalty": 1.1, "samplers": ["top_k", "temperature"], "logit_bias": [[3, -1.5]]}"#,
    )
    .expect("this should parse");
    assert_eq!(sampling.temperature, 0.5);
    assert_eq!(sampling.samplers, [Kind::TopK, Kind::Temperature]);
    assert_eq!(sampling.logit_bias, [(3, -1.5)]);
    assert_eq!(sampling.top_k, 40);
    let json = serde_json::to_string(&sampling).expect("this should serialise");
    assert_eq!(serde_json::from_str::<Sampling>(&json).expect("this should parse"), sampling);
}

#[test]
fn bad_settings_and_bad_logits_are_told() {
    let refused = |sampling: Sampling| Sampler::new(sampling, 8, None).expect_err("this is wrong").to_string();
    assert!(refused(Sampling { temperature: f32::NAN, ..Sampling::default() }).contains("temperature"));
    assert!(refused(Sampling { min_p: 1.5, ..Sampling::default() }).contains("min_p"));
    assert!(refused(Sampling { repeat_penalty: 0.0, ..Sampling::default() }).contains("repeat_penalty"));
    assert!(refused(Sampling { mirostat: 1, ..Sampling::default() }).contains("mirostat"));
    assert!(refused(Sampling { logit_bias: vec![(8, 1.0)], ..Sampling::default() }).contains("token 8"));
    let mut sampler = sampler(Sampling::default(), 3);
    let mut fails = |logits: &[f32], mask: Option<&[u32]>| {
        sampler.sample(logits, Step { mask, ..Step::default() }).expect_err("this is wrong").to_string()
    };
    assert!(fails(&[0.0, f32::NAN, 1.0], None).contains("token 1"));
    assert!(fails(&[0.0, f32::INFINITY, 1.0], None).contains("token 1"));
    assert!(fails(&[0.0, 1.0], None).contains("2 logits"));
    assert!(fails(&[0.0; 3], Some(&[])).contains("0 words"));
    assert!(fails(&[0.0; 3], Some(&[0b1000])).contains("no token is left"));
}

#[test]
fn bias_forbids_and_prefers() {
    let logits = [0.0, 0.0, 0.0];
    let sampling = Sampling { logit_bias: vec![(0, -100.0), (2, 50.0)], ..Sampling::default() };
    assert_eq!(frequencies(sampling, &logits, 256), [0.0, 0.0, 1.0]);
    let sampling = Sampling { logit_bias: vec![(0, f32::NEG_INFINITY), (2, -100.0)], ..Sampling::default() };
    assert_eq!(frequencies(sampling, &logits, 256), [0.0, 1.0, 0.0]);
}

/// Settings of all kinds.
fn any_sampling() -> impl Strategy<Value = Sampling> {
    let order = proptest::sample::subsequence(Kind::DEFAULT_ORDER.to_vec(), 0..=9).prop_shuffle();
    let truncation = (-1i32..20, 0.0f32..=1.0, 0.0f32..1.0, 0.0f32..=1.0, -1.0f32..3.0);
    let other = (0.0f32..2.0, 0.0f32..0.5, 0.0f32..1.0, 0.0f32..0.6, 0.0f32..2.0, 0u32..4);
    (order, truncation, other, any::<u64>()).prop_map(
        |(
            samplers,
            (top_k, top_p, min_p, typical_p, top_n_sigma),
            (temperature, range, xtc, threshold, dry, keep),
            seed,
        )| {
            Sampling {
                samplers,
                top_k,
                top_p,
                min_p,
                typical_p,
                top_n_sigma,
                temperature,
                dynatemp_range: range,
                xtc_probability: xtc,
                xtc_threshold: threshold,
                dry_multiplier: dry,
                repeat_penalty: 1.3,
                min_keep: keep,
                seed: Some(seed),
                ..Sampling::default()
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_draw_is_allowed_repeatable_and_independent_of_the_past_call(
        sampling in any_sampling(),
        logits in proptest::collection::vec(-20.0f32..20.0, 1..80),
        bits in any::<u64>(),
        past in proptest::collection::vec(0u32..4, 0..12),
    ) {
        let n_vocab = logits.len();
        // At least one token is allowed.
        let mut mask = [bits as u32, (bits >> 32) as u32, bits as u32];
        mask[0] |= 1;
        let step = Step { mask: Some(&mask), logprobs: Some(2), ..Step::default() };
        let mut first = Sampler::new(sampling.clone(), n_vocab, None).expect("valid");
        first.prompt(&past);
        let mut second = first.clone();
        let drawn = first.sample(&logits, step).expect("a draw should succeed");
        prop_assert!(mask[drawn.token as usize / 32] >> (drawn.token % 32) & 1 == 1);
        prop_assert_eq!(&drawn, &second.sample(&logits, step).expect("a draw should succeed"));
        // The same again: a draw leaves nothing behind before it is accepted.
        prop_assert_eq!(&drawn, &first.sample(&logits, step).expect("a draw should succeed"));
    }

    #[test]
    fn truncation_never_drops_the_best_and_keeps_enough(
        sampling in any_sampling(),
        logits in proptest::collection::vec(-20.0f32..20.0, 1..80),
    ) {
        for kind in [Kind::TopNSigma, Kind::TopK, Kind::TopP, Kind::MinP] {
            let sampler = Sampler::new(sampling.clone(), logits.len(), None).expect("valid");
            let mut left = sampler.candidates(&logits, None).expect("all are there");
            let best = left.best();
            sampler.apply(kind, &mut left);
            prop_assert_eq!(left.best(), best);
            if kind != Kind::TopNSigma {
                prop_assert!(left.len() >= (sampling.min_keep as usize).min(logits.len()));
            }
            // What is left is the upper part: nothing dropped is better than anything kept.
            let worst = left.items().iter().map(|item| item.logit).fold(f32::INFINITY, f32::min);
            let better = logits.iter().filter(|logit| **logit > worst).count();
            prop_assert!(better < left.len());
        }
    }
}
