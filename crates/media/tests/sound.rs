//! Sounds: every format, what attackers do, and the spectrograms that families want, against `scripts/goldens/vision --sound`.

use kiln_media::{Error, Sound, SoundError, SoundKeys, SoundLimits, decode_sound, is_picture, is_sound};
use proptest::prelude::*;

const TONES: [(&str, &[u8]); 3] = [
    ("MP3", include_bytes!("sounds/tone.mp3")),
    ("OGG", include_bytes!("sounds/tone.ogg")),
    ("FLAC", include_bytes!("sounds/tone.flac")),
];

/// How samples are stored: the code of a WAV, and bytes of one.
#[derive(Clone, Copy)]
enum Stored {
    Whole(u16),
    Float(u16),
}

fn wav(rate: u32, channels: u16, stored: Stored, data: &[u8]) -> Vec<u8> {
    let (code, bytes) = match stored {
        Stored::Whole(bytes) => (1_u16, bytes),
        Stored::Float(bytes) => (3, bytes),
    };
    let mut out = b"RIFF".to_vec();
    out.extend((36 + data.len() as u32).to_le_bytes());
    out.extend(b"WAVEfmt \x10\0\0\0");
    out.extend(code.to_le_bytes());
    out.extend(channels.to_le_bytes());
    out.extend(rate.to_le_bytes());
    out.extend((rate * u32::from(channels) * u32::from(bytes)).to_le_bytes());
    out.extend((channels * bytes).to_le_bytes());
    out.extend((bytes * 8).to_le_bytes());
    out.extend(b"data");
    out.extend((data.len() as u32).to_le_bytes());
    out.extend(data);
    out
}

fn halves(samples: &[i16]) -> Vec<u8> {
    samples.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn decoded(bytes: &[u8]) -> Sound {
    decode_sound(bytes, &SoundLimits::default()).expect("the sound should be decoded")
}

fn refused(bytes: &[u8]) -> String {
    decode_sound(bytes, &SoundLimits::default()).expect_err("the bytes should be refused").to_string()
}

#[test]
fn wav_gives_its_samples_and_the_average_of_its_channels() {
    let sound = decoded(&wav(16_000, 1, Stored::Whole(2), &halves(&[0, 16_384, -32_768, 32_767])));
    assert_eq!((sound.rate, &sound.samples[..]), (16_000, &[0.0, 0.5, -1.0, 32_767.0 / 32_768.0][..]));
    let both = decoded(&wav(8_000, 2, Stored::Whole(2), &halves(&[16_384, 0, -8_192, 8_192])));
    assert_eq!((both.rate, &both.samples[..]), (8_000, &[0.25, 0.0][..]));
    assert_eq!(decoded(&wav(16_000, 1, Stored::Whole(1), &[0, 255])).samples, [-1.0, 1.0]);
    let three = decoded(&wav(16_000, 1, Stored::Whole(3), &[0, 0, 0x40, 0, 0, 0x80]));
    assert_eq!(three.samples, [0.5, -1.0]);
    let floats: Vec<u8> = [0.25_f32, -1.5].iter().flat_map(|v| v.to_le_bytes()).collect();
    assert_eq!(decoded(&wav(48_000, 1, Stored::Float(4), &floats)).samples, [0.25, -1.5]);
}

#[test]
fn every_format_gives_the_same_tone() {
    for (format, bytes) in TONES {
        assert!(is_sound(bytes) && !is_picture(bytes), "{format}");
        let sound = decoded(bytes);
        assert_eq!(sound.rate, 22_050, "{format}");
        assert!((sound.seconds() - 1.0 / 3.0).abs() < 0.08, "{format}: {} s", sound.seconds());
        // One channel of two is silent: a quarter of full loudness, 440 times a second.
        let middle = &sound.samples[2_000..6_000];
        let power: f32 = middle.iter().map(|v| v * v).sum::<f32>() / middle.len() as f32;
        assert!((power - 0.25 * 0.25 / 2.0).abs() < 2e-3, "{format}: {power}");
        let crossings = middle.windows(2).filter(|pair| pair[0] < 0.0 && pair[1] >= 0.0).count();
        assert!((79..=81).contains(&crossings), "{format}: {crossings}");
        let brought = sound.at_rate(16_000);
        assert!((brought.seconds() - 1.0 / 3.0).abs() < 0.08 && brought.rate == 16_000, "{format}");
    }
    // A tag before the first frame is left out.
    let tagged = [b"ID3\x04\0\0\0\0\x01\x00".as_slice(), &[0; 128], TONES[0].1].concat();
    assert_eq!(decoded(&tagged), decoded(TONES[0].1));
}

#[test]
fn what_is_no_sound_is_refused_by_name() {
    assert!(refused(b"").contains("no bytes"));
    assert!(refused(b"RIFF are what I wrote").contains("no sound that can be read"));
    assert!(refused(b"\x89PNG\r\n\x1a\n").contains("WAV, MP3, FLAC or OGG"));
    assert!(refused(&wav(16_000, 1, Stored::Whole(2), &[])).contains("no samples"));
    assert!(refused(&wav(16_000, 1, Stored::Whole(2), &[])[..20]).contains("WAV sound cannot be decoded"));
    assert!(refused(b"OggS\0\0\0\0\0\0\0\0\0\0\0\0").contains("OGG sound cannot be decoded"));
    assert!(refused(b"fLaC\0\0\0\0").contains("FLAC sound cannot be decoded"));
    assert!(refused(&[b"ID3\x04\0\0\x7f\x7f\x7f\x7f".as_slice(), &[0; 40]].concat()).contains("MP3"));
    for value in [f32::NAN, f32::INFINITY, 1e30] {
        let samples: Vec<u8> = [0.5, value].iter().flat_map(|v| v.to_le_bytes()).collect();
        let message = refused(&wav(16_000, 1, Stored::Float(4), &samples));
        assert!(message.contains("sample 1 of the sound is"), "{message}");
    }
    assert!(!is_sound(b"ID3 is how tags begin") && !is_sound(b"") && !is_sound(b"\xff\xd8\xff\xe0\0"));
}

#[test]
fn limits_hold_before_anything_is_decoded() {
    let silence = vec![0; 64_000];
    let one = |channels: u16, rate: u32| refused(&wav(rate, channels, Stored::Whole(2), &silence[..64]));
    assert!(one(9, 16_000).contains("9 channels; 1 to 8"));
    assert!(one(1, 100).contains("100 samples a second; 4000 to 384000"));
    assert!(one(1, 400_000).contains("400000 samples a second"));
    let limits = SoundLimits { seconds: 1, ..SoundLimits::default() };
    let long = wav(16_000, 1, Stored::Whole(2), &silence);
    let message = decode_sound(&long, &limits).unwrap_err().to_string();
    assert!(message.contains("longer than 1 seconds") && message.contains("cut it"), "{message}");
    // A header that promises more than there is does not count, unless it promises too much.
    let mut promising = wav(16_000, 1, Stored::Whole(2), &halves(&[1, 2, 3]));
    let mut promise = |bytes: u32| {
        promising[4..8].copy_from_slice(&(bytes + 36).to_le_bytes());
        promising[40..44].copy_from_slice(&bytes.to_le_bytes());
        promising.clone()
    };
    assert_eq!(decoded(&promise(60_000)).samples.len(), 3);
    assert!(refused(&promise(4_000_000_000)).contains("longer than 2400 seconds"));
    let limits = SoundLimits { samples: 3_000, ..SoundLimits::default() };
    for (format, bytes) in TONES {
        let refused = decode_sound(bytes, &limits);
        assert!(matches!(refused, Err(SoundError::Length { .. })), "{format}: {refused:?}");
    }
}

#[test]
fn files_that_are_cut_off_or_changed_neither_panic_nor_hang() {
    for (_, bytes) in TONES {
        for end in (0..bytes.len()).step_by(37) {
            let _ = decode_sound(&bytes[..end], &SoundLimits::default());
        }
        for at in (0..bytes.len()).step_by(11) {
            let mut changed = bytes.to_vec();
            changed[at] ^= 0x55;
            let _ = decode_sound(&changed, &SoundLimits::default());
        }
    }
}

proptest! {
    #[test]
    fn bytes_behind_any_beginning_are_refused_or_decoded(
        kind in 0..4_usize,
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
    ) {
        let start: &[u8] = [&b"RIFF\xff\xff\0\0WAVE"[..], b"fLaC", b"OggS", b"\xff\xfb"][kind];
        if let Ok(sound) = decode_sound(&[start, &bytes].concat(), &SoundLimits::default()) {
            prop_assert!(sound.samples.iter().all(|v| v.is_finite()));
        }
    }
}

/// The sound that `heard` of the script makes.
fn heard(samples: i64) -> Vec<f32> {
    let one = |i: i64| {
        let phase = (i * 331 + ((i * i) >> 7) * (i / 8000 % 3)) & 0xFFFF;
        let wave = (phase - 32_768).abs() - 16_384;
        let noise = ((((i * 7919 + ((i * i) >> 3)) * 104_729) >> 5) & 0x7FF) - 1024;
        ((wave * (i % 4000)).div_euclid(5000) + noise) as f32 / 32_768.0
    };
    (0..samples).map(one).collect()
}

#[test]
fn spectrograms_are_those_of_the_reference() {
    for line in include_str!("sound.txt").lines() {
        let mut words = line.split(' ');
        let mut word = || words.next().expect("another word");
        let (kind, bins, samples) = (word(), word().parse().unwrap(), word().parse().unwrap());
        let hearing = SoundKeys { bins }.hearing(kind).expect("a family");
        let inputs = hearing.prepare(&heard(samples));
        for (nth, input) in inputs.iter().enumerate() {
            let what = format!("{kind} of {samples} samples, input {nth}");
            assert_eq!(input.frames(), word().parse::<usize>().unwrap(), "{what}");
            let sums: [f64; 2] = [word().parse().unwrap(), word().parse().unwrap()];
            let want: Vec<f64> = word().split(',').map(|v| v.parse().unwrap()).collect();
            let all = || input.values.iter().map(|v| f64::from(*v));
            let step = input.values.len() / 24 + 1;
            let off: f64 = all().step_by(step).zip(&want).map(|(a, b)| (a - b).powi(2)).sum();
            let power: f64 = want.iter().map(|v| v * v).sum();
            assert!(off / power < 1e-10, "{what}: {:e}", off / power);
            let [sum, squares] = [all().sum::<f64>(), all().map(|v| v * v).sum()];
            assert!((sum - sums[0]).abs() < 1e-5 * sums[1].abs().max(1.0), "{what}: {sum} and {}", sums[0]);
            assert!((squares - sums[1]).abs() < 1e-5 * sums[1], "{what}: {squares} and {}", sums[1]);
        }
        assert!(word_is_over(words), "{kind} of {samples} samples has more inputs");
    }
}

fn word_is_over<'w>(mut words: impl Iterator<Item = &'w str>) -> bool {
    words.next().is_none()
}

#[test]
fn a_sound_of_no_length_is_still_heard() {
    for kind in ["ultravox", "qwen3a", "gemma4a", "gemma4ua", "lfm2a"] {
        let hearing = SoundKeys { bins: 80 }.hearing(kind).expect("a family");
        for samples in [1, 160, 201, 16_000] {
            let inputs = hearing.prepare(&heard(samples));
            assert!(!inputs.is_empty() && inputs.iter().all(|input| input.frames() > 0), "{kind} of {samples}");
            assert!(inputs.iter().flat_map(|input| &input.values).all(|v| v.is_finite()), "{kind} of {samples}");
        }
    }
    assert!(SoundKeys { bins: 80 }.hearing("hologram").is_none());
    assert!(matches!(Error::from(SoundError::Empty), Error::Sound(_)));
}
