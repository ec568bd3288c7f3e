//! Bytes of a file to samples. Channels, rate and length are looked at before anything is allocated for samples; the decoders are Rust
//! throughout.

use std::io::{Cursor, ErrorKind};

use kiln_system::text::shown;
use symphonia::core::audio::conv::FromSample;
use symphonia::core::audio::sample::Sample;
use symphonia::core::audio::{Audio, AudioBuffer, GenericAudioBufferRef};
use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::errors::Error as Trouble;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::{MediaSourceStream, MediaSourceStreamOptions};
use symphonia::default::formats::{FlacReader, MpaReader, OggReader, WavReader};

use super::Sound;
use super::error::SoundError;

/// What a sound may be at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoundLimits {
    /// Seconds.
    pub seconds: u64,
    /// Samples of one channel.
    pub samples: usize,
    /// Channels.
    pub channels: usize,
    /// Fewest and most samples of a second.
    pub rates: [u32; 2],
}

impl Default for SoundLimits {
    /// As long as the longest sounds that models have been trained with, in memory of half a gigabyte.
    fn default() -> SoundLimits {
        SoundLimits { seconds: 2400, samples: 1 << 27, channels: 8, rates: [4_000, 384_000] }
    }
}

/// Sounds are waves between -1 and 1; files of floats may go a little further, and nothing sensible goes beyond this.
const LOUDEST: f32 = 1024.0;

impl SoundLimits {
    /// Most samples at this rate.
    fn most(&self, rate: u32) -> usize {
        usize::try_from(self.seconds * u64::from(rate)).unwrap_or(usize::MAX).min(self.samples)
    }

    fn too_long(&self, rate: u32) -> SoundError {
        SoundError::Length { rate, most: (self.most(rate) / rate.max(1) as usize) as u64 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Wav,
    Mp3,
    Flac,
    Ogg,
}

impl Kind {
    /// By the first bytes, which every file of the kind has.
    fn guess(bytes: &[u8]) -> Option<Kind> {
        let riff = bytes.len() >= 12 && bytes.starts_with(b"RIFF") && &bytes[8..12] == b"WAVE";
        // Layer III of MPEG 1, 2 or 2.5, with a bit rate and a sample rate that exist.
        let frame = |b: &[u8]| {
            b.len() >= 4
                && b[0] == 0xFF
                && b[1] & 0xE6 == 0xE2
                && b[1] & 0x18 != 0x08
                && !matches!(b[2] >> 4, 0 | 15)
                && b[2] & 0x0C != 0x0C
        };
        match bytes {
            _ if riff => Some(Kind::Wav),
            _ if bytes.starts_with(b"fLaC") => Some(Kind::Flac),
            _ if bytes.starts_with(b"OggS") => Some(Kind::Ogg),
            _ if bytes.starts_with(b"ID3") || frame(bytes) => Some(Kind::Mp3),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Wav => "WAV",
            Kind::Mp3 => "MP3",
            Kind::Flac => "FLAC",
            Kind::Ogg => "OGG",
        }
    }

    fn reader<'s>(self, bytes: &'s [u8]) -> Result<Box<dyn FormatReader + 's>, Trouble> {
        let bytes = if self == Kind::Mp3 { &bytes[tag_length(bytes)..] } else { bytes };
        let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), MediaSourceStreamOptions::default());
        let options = FormatOptions::default();
        Ok(match self {
            Kind::Wav => Box::new(WavReader::try_new(stream, options)?),
            Kind::Mp3 => Box::new(MpaReader::try_new(stream, options)?),
            Kind::Flac => Box::new(FlacReader::try_new(stream, options)?),
            Kind::Ogg => Box::new(OggReader::try_new(stream, options)?),
        })
    }
}

/// Bytes of a tag before the first frame of an MP3: its length stands in it, seven bits a byte.
fn tag_length(bytes: &[u8]) -> usize {
    let Some([b'I', b'D', b'3', _, _, flags, a, b, c, d]) = bytes.first_chunk::<10>() else { return 0 };
    let length = [a, b, c, d].iter().fold(0_usize, |length, byte| length << 7 | usize::from(**byte & 0x7F));
    let footer = if flags & 0x10 == 0 { 0 } else { 10 };
    (10 + length + footer).min(bytes.len())
}

/// Whether these bytes begin as those of a sound do and are no text, which may begin so by chance.
pub fn is_sound(bytes: &[u8]) -> bool {
    Kind::guess(bytes).is_some() && (bytes.contains(&0) || std::str::from_utf8(bytes).is_err())
}

/// The sound in these bytes, its channels averaged to one.
pub fn decode_sound(bytes: &[u8], limits: &SoundLimits) -> Result<Sound, SoundError> {
    if bytes.is_empty() {
        return Err(SoundError::Empty);
    }
    let kind = Kind::guess(bytes).ok_or(SoundError::Format { bytes: bytes.len() })?;
    let format = kind.name();
    let failed = |why: &str| SoundError::Decode { format, why: shown(why) };
    let wrong = |why: Trouble| failed(&why.to_string());
    let mut reader = kind.reader(bytes).map_err(wrong)?;
    let track = reader.default_track(TrackType::Audio).ok_or_else(|| failed("it has no track of sound"))?;
    let (id, declared) = (track.id, track.num_frames);
    let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio());
    let parameters = parameters.ok_or_else(|| failed("it does not say how its samples are stored"))?;
    if let Some(channels) = &parameters.channels {
        check_channels(channels.count(), limits)?;
    }
    if let Some(rate) = parameters.sample_rate {
        check_rate(rate, limits)?;
        if declared.is_some_and(|frames| frames > limits.most(rate) as u64) {
            return Err(limits.too_long(rate));
        }
    }
    let options = AudioDecoderOptions::default();
    let mut decoder = symphonia::default::get_codecs().make_audio_decoder(parameters, &options).map_err(wrong)?;
    let mut mono = Mono { limits, sound: None };
    loop {
        let packet = match reader.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => break,
            // A file that was cut off is heard as far as it goes; so is the first of several that were put behind each other.
            Err(Trouble::IoError(why)) if why.kind() == ErrorKind::UnexpectedEof => break,
            Err(Trouble::ResetRequired) => break,
            Err(why) => return Err(wrong(why)),
        };
        if packet.track_id != id {
            continue;
        }
        match decoder.decode(&packet) {
            Ok(buffer) => mono.push(&buffer)?,
            // The first frames of an MP3 that was cut out of a longer one lean on what is not there.
            Err(Trouble::DecodeError(_)) if kind == Kind::Mp3 => {}
            Err(Trouble::IoError(why)) if why.kind() == ErrorKind::UnexpectedEof => break,
            Err(why) => return Err(wrong(why)),
        }
    }
    match mono.sound {
        Some(sound) if !sound.samples.is_empty() => sound.checked(),
        _ => Err(SoundError::Silent { format }),
    }
}

fn check_channels(channels: usize, limits: &SoundLimits) -> Result<(), SoundError> {
    let most = limits.channels;
    if (1..=most).contains(&channels) { Ok(()) } else { Err(SoundError::Channels { channels, most }) }
}

fn check_rate(rate: u32, limits: &SoundLimits) -> Result<(), SoundError> {
    let [least, most] = limits.rates;
    if (least..=most).contains(&rate) { Ok(()) } else { Err(SoundError::Rate { rate, least, most }) }
}

impl Sound {
    /// Refuses samples that no sound has; what is not a number among them.
    fn checked(self) -> Result<Sound, SoundError> {
        match self.samples.iter().position(|sample| sample.is_nan() || sample.abs() > LOUDEST) {
            Some(at) => Err(SoundError::Sample { at, value: self.samples[at], most: LOUDEST }),
            None => Ok(self),
        }
    }
}

/// What has been heard so far.
struct Mono<'l> {
    limits: &'l SoundLimits,
    sound: Option<Sound>,
}

impl Mono<'_> {
    /// Adds decoded samples. What a packet says about channels and rate counts, since headers may say nothing.
    fn push(&mut self, buffer: &GenericAudioBufferRef<'_>) -> Result<(), SoundError> {
        let rate = buffer.spec().rate();
        check_rate(rate, self.limits)?;
        check_channels(buffer.num_planes(), self.limits)?;
        let sound = self.sound.get_or_insert_with(|| Sound { rate, samples: Vec::new() });
        if sound.rate != rate {
            return Err(SoundError::Rate { rate, least: sound.rate, most: sound.rate });
        }
        if sound.samples.len() + buffer.frames() > self.limits.most(rate) {
            return Err(self.limits.too_long(rate));
        }
        let to = &mut sound.samples;
        match buffer {
            // Bytes go from -1 to 1, both of which they reach.
            GenericAudioBufferRef::U8(b) => average(b, |v| f32::from(v) / 127.5 - 1.0, to),
            GenericAudioBufferRef::U16(b) => average(b, f32::from_sample, to),
            GenericAudioBufferRef::U24(b) => average(b, f32::from_sample, to),
            GenericAudioBufferRef::U32(b) => average(b, f32::from_sample, to),
            GenericAudioBufferRef::S8(b) => average(b, f32::from_sample, to),
            GenericAudioBufferRef::S16(b) => average(b, |v| f32::from(v) / 32768.0, to),
            GenericAudioBufferRef::S24(b) => average(b, f32::from_sample, to),
            GenericAudioBufferRef::S32(b) => average(b, f32::from_sample, to),
            GenericAudioBufferRef::F32(b) => average(b, |v| v, to),
            GenericAudioBufferRef::F64(b) => average(b, |v| v as f32, to),
        }
        Ok(())
    }
}

/// Adds the average of all channels.
fn average<S: Sample>(buffer: &AudioBuffer<S>, float: impl Fn(S) -> f32, to: &mut Vec<f32>) {
    let planes: Vec<&[S]> = (0..buffer.num_planes()).filter_map(|plane| buffer.plane(plane)).collect();
    let count = planes.len().max(1) as f32;
    to.extend((0..buffer.frames()).map(|at| planes.iter().map(|plane| float(plane[at])).sum::<f32>() / count));
}
