//! Bytes between host and device. Uploads go through a ring of staging buffers, so that the caller reads the next
//! piece of a file while the device copies the last.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Buffer, Commands, Device, Error, MemoryKind, Recorder, Submission};

/// Bytes of one staging buffer. All of a ring fit one allocation for uploads, which is kept: taking one from the driver
/// takes milliseconds.
const STAGE_BYTES: u64 = 8 << 20;
/// Staging buffers in the ring: one being filled, the others on their way.
const STAGES: usize = 3;

/// Copies host bytes into device memory, piece by piece.
pub struct Uploader {
    device: Arc<Device>,
    stages: Vec<Stage>,
    next: usize,
    waited: Duration,
    copied: Duration,
}

struct Stage {
    buffer: Buffer,
    /// The copy out of this buffer that is still running.
    running: Option<(Commands, Submission)>,
}

impl Uploader {
    /// An uploader with its own staging memory.
    pub fn new(device: &Arc<Device>) -> Result<Uploader, Error> {
        let stage = || Ok(Stage { buffer: device.allocate(MemoryKind::Upload, STAGE_BYTES)?, running: None });
        let stages = (0..STAGES).map(|_| stage()).collect::<Result<Vec<_>, Error>>()?;
        let (waited, copied) = (Duration::ZERO, Duration::ZERO);
        Ok(Uploader { device: Arc::clone(device), stages, next: 0, waited, copied })
    }

    /// Copies `data` to `offset` of a buffer. Returns when the host's part is done; `finish` waits for the device's.
    pub fn write(&mut self, to: &Buffer, offset: u64, data: &[u8]) -> Result<(), Error> {
        if to.is_mapped() {
            to.write(offset, data);
            return Ok(());
        }
        for (i, piece) in data.chunks(STAGE_BYTES as usize).enumerate() {
            let stage = &mut self.stages[self.next];
            self.next = (self.next + 1) % STAGES;
            let start = Instant::now();
            if let Some((_, submission)) = stage.running.take() {
                self.device.wait(submission, self.device.patience())?;
            }
            let begun = Instant::now();
            self.waited += begun - start;
            stage.buffer.write(0, piece);
            self.copied += begun.elapsed();
            let mut recorder = Recorder::new(&self.device)?;
            recorder.copy((&stage.buffer, 0), (to, offset + i as u64 * STAGE_BYTES), piece.len() as u64)?;
            let commands = recorder.finish()?;
            let submission = commands.submit()?;
            stage.running = Some((commands, submission));
        }
        Ok(())
    }

    /// How long it has waited for the device, and copied to staging memory, so far.
    pub fn times(&self) -> [Duration; 2] {
        [self.waited, self.copied]
    }

    /// Fills a whole buffer with zeros.
    pub fn zero(&mut self, to: &Buffer) -> Result<(), Error> {
        if to.is_mapped() {
            to.write(0, &vec![0; to.bytes() as usize]);
            return Ok(());
        }
        let mut recorder = Recorder::new(&self.device)?;
        // Pieces are rounded up to far more than the four bytes a fill works in.
        recorder.fill((to, 0), to.bytes().next_multiple_of(4), 0)?;
        recorder.finish()?.run()
    }

    /// Waits until everything has arrived.
    pub fn finish(&mut self) -> Result<(), Error> {
        for stage in &mut self.stages {
            if let Some((_, submission)) = stage.running.take() {
                self.device.wait(submission, self.device.patience())?;
            }
        }
        Ok(())
    }
}

impl Device {
    /// Reads a range of a buffer back and waits for it.
    pub fn read(self: &Arc<Self>, from: &Buffer, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        if data.is_empty() {
            return Ok(());
        }
        if from.is_mapped() {
            from.read(offset, data);
            return Ok(());
        }
        let stage = self.allocate(MemoryKind::Readback, (data.len() as u64).min(STAGE_BYTES))?;
        for (i, piece) in data.chunks_mut(STAGE_BYTES as usize).enumerate() {
            let mut recorder = Recorder::new(self)?;
            recorder.copy((from, offset + i as u64 * STAGE_BYTES), (&stage, 0), piece.len() as u64)?;
            recorder.finish()?.run()?;
            stage.read(0, piece);
        }
        Ok(())
    }
}
