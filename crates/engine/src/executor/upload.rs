//! Weights on their way to a device. Reading a file that the system has in memory, packing and copying into memory that the device can
//! read each take longer than the bus does, so several threads do it, each with staging memory of its own.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use kiln_gguf::{TensorType, quant};
use kiln_gpu::{Buffer, Device, Uploader};

use crate::Error;

/// Bytes of the file that a thread takes at once: enough for several of its staging buffers.
const PIECE_BYTES: usize = 16 << 20;
/// Threads that upload. Each copies about 4 GB a second, and has staging memory.
const MOST_THREADS: usize = 8;

/// A part of a tensor.
struct Piece<'a> {
    to: Buffer,
    /// Where it begins there.
    offset: u64,
    /// What it becomes on the way.
    packed: Option<TensorType>,
    data: &'a [u8],
}

/// Bytes that a packed block takes in the file.
pub(super) fn group_bytes(ty: TensorType) -> usize {
    ty.block_len() / ty.base().block_len() * ty.base().block_bytes()
}

/// Where tensors are handed in.
pub(super) struct Pieces<'a>(SyncSender<Piece<'a>>);

impl<'a> Pieces<'a> {
    /// Has a tensor written to a buffer, packed as this type if one is given. Waits while the threads have enough to do.
    pub(super) fn put(&self, to: &Buffer, packed: Option<TensorType>, data: &'a [u8]) {
        let (group, block) = packed.map_or((1, 1), |ty| (group_bytes(ty), ty.block_bytes()));
        let groups = PIECE_BYTES.div_ceil(group.max(block));
        for (i, data) in data.chunks(groups * group).enumerate() {
            let offset = (i * groups * block) as u64;
            // Sending fails only if every thread has failed, which is reported when they are joined.
            let _ = self.0.send(Piece { to: to.clone(), offset, packed, data });
        }
    }
}

/// Uploads what `tensors` hands in and waits until all of it has arrived.
pub(super) fn upload<'a>(
    device: &Arc<Device>,
    tensors: impl FnOnce(&Pieces<'a>) -> Result<(), Error>,
) -> Result<(), Error> {
    let threads = rayon::current_num_threads().clamp(1, MOST_THREADS);
    let (sender, receiver) = sync_channel(threads);
    let receiver = Mutex::new(receiver);
    thread::scope(|scope| {
        let workers: Vec<ScopedJoinHandle<'_, Result<(), Error>>> =
            (0..threads).map(|_| scope.spawn(|| work(device, &receiver))).collect();
        let told = tensors(&Pieces(sender));
        let done =
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        // Every thread is joined, whatever the first one says.
        let done: Vec<Result<(), Error>> = done.collect();
        told.and(done.into_iter().collect())
    })
}

/// Takes pieces until there are no more. After a failure pieces are taken and dropped, so that no sender waits for room.
fn work(device: &Arc<Device>, pieces: &Mutex<Receiver<Piece<'_>>>) -> Result<(), Error> {
    let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
    let written = || {
        let start = Instant::now();
        let mut uploader = Uploader::new(device)?;
        let (began, mut packing) = (start.elapsed(), Duration::ZERO);
        let mut packed = Vec::new();
        while let Some(piece) = next() {
            let data = match piece.packed {
                None => piece.data,
                Some(ty) => {
                    let start = Instant::now();
                    packed.resize(piece.data.len() / group_bytes(ty) * ty.block_bytes(), 0);
                    quant::pack(ty, piece.data, &mut packed)
                        .expect("rows should be whole blocks: the type was chosen so");
                    packing += start.elapsed();
                    &packed
                }
            };
            uploader.write(&piece.to, piece.offset, data)?;
        }
        uploader.finish()?;
        let [waited, copied] = uploader.times();
        log::debug!(
            "uploaded for {:.0?}: taking memory {began:.0?}, packing {packing:.0?}, copying {copied:.0?}, waiting {waited:.0?}",
            start.elapsed()
        );
        Ok(())
    };
    let result = written();
    while result.is_err() && next().is_some() {}
    result
}
