//! Logits of a whole text in a file, in the layout that llama.cpp's tools read and write (`--kl-divergence-base`): the tokens, and
//! for every place that counts the logarithms of probability as 16-bit steps above a floor.

use std::io::{self, Read, Write};

use super::divergence::Base;
use super::perplexity::LogProbs;

const MAGIC: &[u8; 8] = b"_logits_";
/// Below the largest logit by more than this counts as nothing.
const DEPTH: f32 = 16.0;

/// What a file begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogitsHeader {
    /// Tokens of a chunk.
    pub context: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// The tokens of all chunks.
    pub tokens: Vec<u32>,
}

impl LogitsHeader {
    /// 16-bit words of one place: two floats, the steps, and a word that fills up.
    fn words(&self) -> usize {
        self.vocab.next_multiple_of(2) + 4
    }
}

/// Writes such a file.
pub struct LogitsWriter<W: Write> {
    out: W,
    header: LogitsHeader,
}

impl<W: Write> LogitsWriter<W> {
    /// Begins the file.
    pub fn new(mut out: W, header: LogitsHeader) -> io::Result<LogitsWriter<W>> {
        let number = |n: usize| u32::try_from(n).map(u32::to_le_bytes).map_err(|_| io::Error::other("too many tokens"));
        let chunks = header.tokens.len() / header.context.max(1);
        out.write_all(MAGIC)?;
        for n in [header.context, header.vocab, chunks] {
            out.write_all(&number(n)?)?;
        }
        for token in &header.tokens {
            out.write_all(&token.to_le_bytes())?;
        }
        Ok(LogitsWriter { out, header })
    }

    /// One place more, in the order of the text.
    pub fn write(&mut self, probs: &LogProbs<'_>) -> io::Result<()> {
        let logits = probs.logits();
        let largest = logits[probs.likeliest];
        let floor = logits.iter().fold(f32::INFINITY, |least, &logit| least.min(logit)).max(largest - DEPTH);
        let scale = (largest - floor) / 65535.0;
        let least = probs.of(probs.likeliest) as f32 - (largest - floor);
        let mut bytes = Vec::with_capacity(2 * self.header.words());
        bytes.extend_from_slice(&scale.to_le_bytes());
        bytes.extend_from_slice(&least.to_le_bytes());
        for &logit in logits {
            let step = if scale > 0.0 && logit > floor { ((logit - floor) / scale).round() as u16 } else { 0 };
            bytes.extend_from_slice(&step.to_le_bytes());
        }
        bytes.resize(2 * self.header.words(), 0);
        self.out.write_all(&bytes)
    }

    /// Gives the file back.
    pub fn into_inner(self) -> W {
        self.out
    }
}

/// Reads such a file.
pub struct LogitsFile<R: Read> {
    from: R,
    /// What it begins with.
    pub header: LogitsHeader,
}

/// One place of such a file.
#[derive(Clone, Debug)]
pub struct Recorded {
    scale: f64,
    least: f64,
    steps: Vec<u16>,
}

impl Base for Recorded {
    fn of(&self, token: usize) -> f64 {
        self.least + self.scale * f64::from(self.steps[token])
    }

    fn likeliest(&self) -> usize {
        let largest = self.steps.iter().max();
        self.steps.iter().position(|step| Some(step) == largest).unwrap_or(0)
    }
}

impl<R: Read> LogitsFile<R> {
    /// Reads the beginning of a file of so many bytes.
    pub fn new(mut from: R, bytes: u64) -> io::Result<LogitsFile<R>> {
        let damaged = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        let mut head = [0; 20];
        from.read_exact(&mut head)?;
        if head[..8] != MAGIC[..] {
            return Err(damaged("it is no file of logits"));
        }
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        let (context, vocab, chunks) = (number(8), number(12), number(16));
        // Nothing is allocated that the file does not hold.
        let n = chunks.checked_mul(context).filter(|n| (*n as u64).saturating_mul(4) <= bytes);
        let n = n.filter(|n| *n > 0 && vocab > 0).ok_or_else(|| damaged("it is cut short, or empty"))?;
        let mut ids = vec![0; n * 4];
        from.read_exact(&mut ids)?;
        let tokens = ids.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
        let header = LogitsHeader { context, vocab, tokens };
        if (header.words() as u64).saturating_mul(2) > bytes {
            return Err(damaged("it is cut short"));
        }
        Ok(LogitsFile { from, header })
    }

    /// The next place.
    pub fn read(&mut self) -> io::Result<Recorded> {
        let mut bytes = vec![0; 2 * self.header.words()];
        self.from.read_exact(&mut bytes)?;
        let float = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let words = bytes[8..].as_chunks::<2>().0;
        let steps = words.iter().take(self.header.vocab).map(|word| u16::from_le_bytes(*word)).collect();
        Ok(Recorded { scale: float(0).into(), least: float(4).into(), steps })
    }
}

#[cfg(test)]
mod tests {
    use super::super::compare;
    use super::*;

    #[test]
    fn what_is_written_is_read_back_to_a_step() {
        let rows: Vec<Vec<f32>> =
            (0..3).map(|row| (0..101).map(|id| ((id * 37 + row * 11) % 29) as f32 * 0.7 - 3.0).collect()).collect();
        let header = LogitsHeader { context: 4, vocab: 101, tokens: (0..8).collect() };
        let mut writer = LogitsWriter::new(Vec::new(), header.clone()).unwrap();
        rows.iter().for_each(|row| writer.write(&LogProbs::new(row).unwrap()).unwrap());
        let bytes = writer.into_inner();
        // 20 bytes and the tokens, then 102 + 4 words for each place.
        assert_eq!(bytes.len(), 20 + 32 + 3 * 2 * 106);
        let mut file = LogitsFile::new(&bytes[..], bytes.len() as u64).unwrap();
        assert_eq!(file.header, header);
        for row in &rows {
            let (probs, read) = (LogProbs::new(row).unwrap(), file.read().unwrap());
            for id in 0..101 {
                let want = probs.of(id).max(probs.of(probs.likeliest) - 16.0);
                assert!((read.of(id) - want).abs() < 2.0 * 16.0 / 65535.0, "{id}: {} {want}", read.of(id));
            }
            let (divergence, same, _) = compare(&read, &probs, 0);
            assert!(divergence < 1e-4 && same);
        }
        assert!(file.read().is_err());
        for cut in [0, 7, 19, 40, 60] {
            assert!(LogitsFile::new(&bytes[..cut], cut as u64).and_then(|mut f| f.read()).is_err(), "{cut}");
        }
        let mut huge = bytes.clone();
        huge[8..20].fill(0xff);
        assert!(LogitsFile::new(&huge[..], huge.len() as u64).is_err());
    }
}
