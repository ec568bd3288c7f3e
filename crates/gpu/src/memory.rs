//! Device memory: a few large allocations, each one buffer with a device address, handed out in pieces. Freed pieces
//! are merged. Allocations without pieces go back to the driver, but for one of each kind: taking one takes
//! milliseconds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use vulkanalia::prelude::v1_2::*;

use crate::error::vulkan;
use crate::{Address, Device, Error};

/// Pieces start at multiples of this: enough for every vector load and for a cache line.
const ALIGN: u64 = 256;

/// Bytes that are worth a thread that writes them.
const WRITE_BYTES: usize = 4 << 20;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Weights, caches, activations: the device's own memory.
    Device,
    /// Written by the host, read once by the device: staging.
    Upload,
    /// Written by the device, read by the host.
    Readback,
    /// Small data both sides touch often: device memory that the host sees, where there is such.
    Shared,
}

impl MemoryKind {
    fn name(self) -> &'static str {
        match self {
            MemoryKind::Device => "device",
            MemoryKind::Upload => "upload",
            MemoryKind::Readback => "readback",
            MemoryKind::Shared => "shared",
        }
    }

    /// What to try for a piece of `least` bytes, in this order: properties, and bytes of the allocation. Sharing a large
    /// allocation is a wish, the size that is needed is the demand: all sizes are tried in the best memory before any in
    /// the second best, which may be many times slower.
    fn attempts(self, least: u64, most: u64) -> Vec<(vk::MemoryPropertyFlags, u64)> {
        let mut sizes = vec![self.chunk().min(most).max(least)];
        while let Some(half) = sizes.last().map(|last| (last / 2).max(least)).filter(|half| sizes.last() > Some(half)) {
            sizes.push(half);
        }
        self.wishes().into_iter().flat_map(|wish| sizes.iter().map(move |bytes| (wish, *bytes))).collect()
    }

    /// Property sets to look for, best first.
    fn wishes(self) -> [vk::MemoryPropertyFlags; 2] {
        use vk::MemoryPropertyFlags as P;
        let host = P::HOST_VISIBLE | P::HOST_COHERENT;
        match self {
            MemoryKind::Device => [P::DEVICE_LOCAL, P::empty()],
            MemoryKind::Upload => [host, host],
            MemoryKind::Readback => [host | P::HOST_CACHED, host],
            MemoryKind::Shared => [host | P::DEVICE_LOCAL, host],
        }
    }

    /// Size of an allocation that several pieces share.
    fn chunk(self) -> u64 {
        match self {
            MemoryKind::Device => 256 << 20,
            MemoryKind::Upload | MemoryKind::Readback => 32 << 20,
            MemoryKind::Shared => 1 << 20,
        }
    }
}

/// One allocation of the driver.
pub(crate) struct Chunk {
    kind: MemoryKind,
    memory: vk::DeviceMemory,
    buffer: vk::Buffer,
    address: u64,
    bytes: u64,
    mapped: Option<Mapped>,
    /// Free pieces: offset to length.
    free: BTreeMap<u64, u64>,
}

/// The host's view of an allocation.
#[derive(Clone, Copy)]
struct Mapped(*mut u8);

// SAFETY: the pointer is to memory mapped for the life of the allocation; `Buffer` guards who touches which bytes.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Chunk {
    /// Takes the first free piece that is long enough.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let (offset, length) = self.free.iter().map(|(o, l)| (*o, *l)).find(|(_, length)| *length >= bytes)?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Gives a piece back and merges it with its neighbours.
    fn give(&mut self, mut offset: u64, mut bytes: u64) {
        if let Some(after) = self.free.remove(&(offset + bytes)) {
            bytes += after;
        }
        if let Some((&before, &length)) = self.free.range(..offset).next_back()
            && before + length == offset
        {
            self.free.remove(&before);
            offset = before;
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }

    fn is_unused(&self) -> bool {
        self.free.get(&0) == Some(&self.bytes)
    }
}

/// Every allocation of a device. Numbers of chunks stay fixed while pieces point to them.
#[derive(Default)]
pub(crate) struct Arenas {
    chunks: Vec<Option<Chunk>>,
}

impl Arenas {
    /// Takes out what need not be kept: every allocation without pieces or, with `spare`, all but one of each kind.
    fn idle(&mut self, spare: bool) -> Vec<Chunk> {
        let mut kept = Vec::new();
        let mut idle = Vec::new();
        for place in &mut self.chunks {
            let Some(chunk) = place.as_ref().filter(|c| c.is_unused()) else { continue };
            // Larger ones than usual were made for one piece.
            if spare && chunk.bytes <= chunk.kind.chunk() && !kept.contains(&chunk.kind) {
                kept.push(chunk.kind);
            } else {
                idle.extend(place.take());
            }
        }
        idle
    }

    /// Takes out everything.
    pub(crate) fn all(&mut self) -> Vec<Chunk> {
        std::mem::take(&mut self.chunks).into_iter().flatten().collect()
    }
}

/// A piece of memory. Clones share it; the last one gives it back.
#[derive(Clone)]
pub struct Buffer(Arc<Piece>);

struct Piece {
    device: Arc<Device>,
    chunk: usize,
    offset: u64,
    /// Length as asked for; the piece is rounded up to `ALIGN`.
    bytes: u64,
    raw: vk::Buffer,
    address: u64,
    mapped: Option<Mapped>,
    /// Held while the host copies in or out: clones of a buffer may be on several threads.
    host: Mutex<()>,
    kind: MemoryKind,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer {{ {}, {} bytes at {:#x} }}", self.0.kind.name(), self.0.bytes, self.0.address)
    }
}

impl Buffer {
    /// Its address on the device.
    pub fn address(&self) -> Address {
        Address(self.0.address)
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    pub(crate) fn raw(&self) -> (vk::Buffer, u64) {
        (self.0.raw, self.0.offset)
    }

    /// Whether the host can read and write it directly.
    pub fn is_mapped(&self) -> bool {
        self.0.mapped.is_some()
    }

    fn host(&self, offset: u64, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes as u64);
        assert!(end.is_some_and(|e| e <= self.0.bytes), "{bytes} bytes at {offset} exceed {self:?}");
        let Some(Mapped(start)) = self.0.mapped else { panic!("{self:?} should be visible to the host") };
        // SAFETY: `start` maps the whole piece, and the range was checked against it.
        unsafe { start.add(offset as usize) }
    }

    /// Copies bytes in. The device must not be using this range.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let to = self.host(offset, data.len());
        let _alone = self.0.host.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `to` is valid for the length; `data` is Rust memory and cannot overlap a mapping; no other thread copies
        // to or from this piece meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
    }

    /// The same by several threads, for bytes of which there are many.
    pub fn write_many(&self, offset: u64, data: &[u8]) {
        self.write_pieces(&[(offset, data)]);
    }

    /// Copies pieces in, each to its offset; they must lie apart. Where there are many bytes it is done by several threads: one fills a
    /// fraction of what a bus takes. They are threads of their own, because one of a pool might take up other work that waits for this piece.
    pub fn write_pieces(&self, pieces: &[(u64, &[u8])]) {
        let all: usize = pieces.iter().map(|(_, data)| data.len()).sum();
        let threads = (all / WRITE_BYTES).min(std::thread::available_parallelism().map_or(1, usize::from));
        if threads < 2 {
            return pieces.iter().for_each(|(offset, data)| self.write(*offset, data));
        }
        let mut order: Vec<(u64, &[u8])> = pieces.to_vec();
        order.sort_unstable_by_key(|(offset, _)| *offset);
        let apart = |pair: &[(u64, &[u8])]| pair[0].0 + pair[0].1.len() as u64 <= pair[1].0;
        assert!(order.windows(2).all(apart), "pieces should lie apart in {self:?}");
        let _alone = self.0.host.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = Vec::new();
        for (offset, data) in order {
            let to = self.host(offset, data.len());
            // SAFETY: `to` is valid for the length, and bytes of any kind may lie there; pieces lie apart; no other thread copies to or
            // from this buffer meanwhile, and the device does not use it.
            let to = unsafe { std::slice::from_raw_parts_mut(to, data.len()) };
            left.extend(to.chunks_mut(WRITE_BYTES / 4).zip(data.chunks(WRITE_BYTES / 4)));
        }
        let left = std::sync::Mutex::new(left);
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).pop();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some((to, from)) = next() {
                        to.copy_from_slice(from);
                    }
                });
            }
        });
    }

    /// Copies bytes out. The device must have finished writing this range.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let from = self.host(offset, data.len());
        let _alone = self.0.host.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len()) };
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // A hung device may still write to the piece: it is never reused.
        if self.device.is_hung() {
            return;
        }
        let mut arenas = self.device.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(chunk) = arenas.chunks[self.chunk].as_mut() else { return };
        chunk.give(self.offset, self.bytes.max(1).next_multiple_of(ALIGN));
        if chunk.is_unused() {
            let idle = arenas.idle(true);
            drop(arenas);
            idle.iter().for_each(|c| self.device.release(c));
        }
    }
}

impl Device {
    /// Takes a piece of memory. Its content is undefined.
    pub fn allocate(self: &Arc<Self>, kind: MemoryKind, bytes: u64) -> Result<Buffer, Error> {
        self.check()?;
        let length = bytes.max(1).next_multiple_of(ALIGN);
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fits = arenas.chunks.iter_mut().enumerate().filter_map(|(i, c)| c.as_mut().map(|c| (i, c)));
        let found = fits.find_map(|(i, c)| (c.kind == kind).then(|| c.take(length)).flatten().map(|o| (i, o)));
        let (index, offset) = match found {
            Some(found) => found,
            None => {
                let mut chunk = self.new_chunk(kind, length, &mut arenas)?;
                let offset = chunk.take(length).expect("a new chunk should hold what it was made for");
                let index = arenas.chunks.iter().position(Option::is_none).unwrap_or(arenas.chunks.len());
                if index == arenas.chunks.len() {
                    arenas.chunks.push(None);
                }
                arenas.chunks[index] = Some(chunk);
                (index, offset)
            }
        };
        let chunk = arenas.chunks[index].as_ref().expect("the chunk was just used");
        // SAFETY: the offset lies inside the mapping.
        let mapped = chunk.mapped.map(|Mapped(start)| Mapped(unsafe { start.add(offset as usize) }));
        Ok(Buffer(Arc::new(Piece {
            device: Arc::clone(self),
            chunk: index,
            offset,
            bytes,
            raw: chunk.buffer,
            address: chunk.address + offset,
            mapped,
            host: Mutex::new(()),
            kind,
        })))
    }

    /// Bytes of all pieces that somebody holds.
    pub fn held_bytes(&self) -> u64 {
        let arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        arenas.chunks.iter().flatten().map(|c| c.bytes - c.free.values().sum::<u64>()).sum()
    }

    /// Bytes taken from the driver so far.
    pub fn allocated_bytes(&self) -> u64 {
        let arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        arenas.chunks.iter().flatten().map(|c| c.bytes).sum()
    }

    /// A new allocation for a piece of `least` bytes, in the best memory that has room.
    fn new_chunk(&self, kind: MemoryKind, least: u64, arenas: &mut Arenas) -> Result<Chunk, Error> {
        let limits = &self.adapter.caps.limits;
        if least > limits.max_buffer_bytes {
            arenas.idle(false).iter().for_each(|c| self.release(c));
            return Err(self.out_of_memory(kind, least));
        }
        let mut other = None;
        let mut refused = None;
        let attempts = kind.attempts(least, limits.max_allocation_bytes.min(limits.max_buffer_bytes));
        for same_memory in attempts.chunk_by(|a, b| a.0 == b.0) {
            loop {
                for &(wish, bytes) in same_memory {
                    match self.try_chunk(kind, bytes, wish, refused.filter(|r| *r != wish)) {
                        Ok(Some(chunk)) => {
                            self.tell_if_spilled(&chunk, wish, refused);
                            return Ok(chunk);
                        }
                        Ok(None) => {}
                        Err(Error::Vulkan {
                            result: vk::ErrorCode::OUT_OF_DEVICE_MEMORY | vk::ErrorCode::OUT_OF_HOST_MEMORY,
                            ..
                        }) => refused = refused.or(Some(wish)),
                        Err(e) => other = Some(e),
                    }
                }
                // Before worse memory is looked at, what lies idle goes back to the driver, and all is tried again.
                let idle = if refused.is_some() { arenas.idle(false) } else { Vec::new() };
                if idle.is_empty() {
                    break;
                }
                idle.iter().for_each(|c| self.release(c));
            }
        }
        Err(other.unwrap_or_else(|| self.out_of_memory(kind, least)))
    }

    /// Memory of the second choice is many times slower, so it is reported instead of left for users to measure.
    fn tell_if_spilled(&self, chunk: &Chunk, wish: vk::MemoryPropertyFlags, refused: Option<vk::MemoryPropertyFlags>) {
        if chunk.kind != MemoryKind::Device || wish == chunk.kind.wishes()[0] || refused.is_none() {
            return;
        }
        let (total, free) = self.memory_now();
        log::warn!(
            "the memory of {} is full ({} of {} free): {} go to the computer's memory, which is far slower; a shorter context or a smaller model would fit",
            self.adapter.name,
            kiln_system::memory::size(free),
            kiln_system::memory::size(total),
            kiln_system::memory::size(chunk.bytes)
        );
    }

    /// Bytes of the device's own memory in all, and those that are free now, as far as the driver tells.
    pub fn memory_now(&self) -> (u64, u64) {
        let has_budget = self.adapter.has(&vk::EXT_MEMORY_BUDGET_EXTENSION);
        let (total, free) = crate::adapter::memory(&self.instance, self.adapter.physical, has_budget);
        (total, free.unwrap_or_else(|| total.saturating_sub(self.allocated_bytes_unlocked())))
    }

    fn out_of_memory(&self, kind: MemoryKind, asked: u64) -> Error {
        let (total, free) = self.memory_now();
        let fits = free.min(self.adapter.caps.limits.max_buffer_bytes);
        Error::OutOfMemory { kind: kind.name(), asked, free, total, fits }
    }

    /// As `allocated_bytes`, for callers that may hold the lock: 0 then.
    fn allocated_bytes_unlocked(&self) -> u64 {
        self.arenas.try_lock().map_or(0, |a| a.chunks.iter().flatten().map(|c| c.bytes).sum())
    }

    /// One allocation of a memory type with these properties and without those that were refused already; `None` where
    /// there is no such type.
    fn try_chunk(
        &self,
        kind: MemoryKind,
        bytes: u64,
        wish: vk::MemoryPropertyFlags,
        refused: Option<vk::MemoryPropertyFlags>,
    ) -> Result<Option<Chunk>, Error> {
        let usage = vk::BufferUsageFlags::STORAGE_BUFFER
            | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS
            | vk::BufferUsageFlags::INDIRECT_BUFFER
            | vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST;
        let info = vk::BufferCreateInfo::builder().size(bytes).usage(usage);
        // SAFETY: the device is alive; the buffer is destroyed on every failing way out.
        let buffer = unsafe { self.raw.create_buffer(&info, None) }.map_err(vulkan("vkCreateBuffer"))?;
        let destroy = || {
            // SAFETY: nothing uses the buffer yet.
            unsafe { self.raw.destroy_buffer(buffer, None) };
        };
        // SAFETY: the buffer was made by this device.
        let needs = unsafe { self.raw.get_buffer_memory_requirements(buffer) };
        let types = &self.memory_types;
        let Some(index) = (0..types.memory_type_count).find(|&i| {
            let flags = types.memory_types[i as usize].property_flags;
            let new = refused.is_none_or(|refused| !flags.contains(refused));
            needs.memory_type_bits & (1 << i) != 0 && flags.contains(wish) && new
        }) else {
            destroy();
            return Ok(None);
        };
        let mut flags = vk::MemoryAllocateFlagsInfo::builder().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        let info = vk::MemoryAllocateInfo::builder()
            .allocation_size(needs.size)
            .memory_type_index(index)
            .push_next(&mut flags);
        // SAFETY: a memory type the buffer accepts.
        let memory = match unsafe { self.raw.allocate_memory(&info, None) } {
            Ok(memory) => memory,
            Err(e) => {
                destroy();
                return Err(vulkan("vkAllocateMemory")(e));
            }
        };
        let visible = kind != MemoryKind::Device;
        // SAFETY: memory and buffer are fresh, from this device, and fit each other.
        let bound = unsafe {
            self.raw.bind_buffer_memory(buffer, memory, 0).map_err(vulkan("vkBindBufferMemory")).and_then(|()| {
                if !visible {
                    return Ok(None);
                }
                let start = self.raw.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty());
                start.map(|p| Some(Mapped(p.cast()))).map_err(vulkan("vkMapMemory"))
            })
        };
        let mapped = match bound {
            Ok(mapped) => mapped,
            Err(e) => {
                destroy();
                // SAFETY: nothing is bound to the memory any more.
                unsafe { self.raw.free_memory(memory, None) };
                return Err(e);
            }
        };
        let info = vk::BufferDeviceAddressInfo::builder().buffer(buffer);
        // SAFETY: the buffer is bound and was made for addresses.
        let address = unsafe { self.raw.get_buffer_device_address(&info) };
        Ok(Some(Chunk { kind, memory, buffer, address, bytes, mapped, free: BTreeMap::from([(0, bytes)]) }))
    }

    pub(crate) fn release(&self, chunk: &Chunk) {
        // SAFETY: no piece of the chunk is left, and commands keep the pieces they use.
        unsafe {
            self.raw.destroy_buffer(chunk.buffer, None);
            self.raw.free_memory(chunk.memory, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(bytes: u64) -> Chunk {
        Chunk {
            kind: MemoryKind::Device,
            memory: vk::DeviceMemory::null(),
            buffer: vk::Buffer::null(),
            address: 0,
            bytes,
            mapped: None,
            free: BTreeMap::from([(0, bytes)]),
        }
    }

    /// A large allocation that is refused is no reason to leave the device's memory: a smaller one is tried there first.
    #[test]
    fn every_size_is_tried_in_the_best_memory_before_any_in_the_next() {
        const MIB: u64 = 1 << 20;
        let local = vk::MemoryPropertyFlags::DEVICE_LOCAL;
        let attempts = MemoryKind::Device.attempts(100 * MIB, 1 << 40);
        let sizes = [256 * MIB, 128 * MIB, 100 * MIB];
        let want =
            [local, vk::MemoryPropertyFlags::empty()].into_iter().flat_map(|wish| sizes.map(|size| (wish, size)));
        assert_eq!(attempts, want.collect::<Vec<_>>());
        let large = MemoryKind::Device.attempts(700 * MIB, 1 << 40);
        assert_eq!(large.iter().map(|a| a.1).collect::<Vec<_>>(), [700 * MIB; 2]);
        let bounded = MemoryKind::Device.attempts(1, 64 * MIB);
        assert_eq!((bounded[0].1, bounded.iter().map(|a| a.1).min()), (64 * MIB, Some(1)));
    }

    #[test]
    fn pieces_given_back_in_any_order_merge_to_the_whole() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1], [1, 2, 0], [2, 0, 1]] {
            let mut c = chunk(1024);
            let taken: Vec<u64> = (0..3).map(|_| c.take(256).unwrap()).collect();
            assert_eq!(taken, [0, 256, 512]);
            assert_eq!(c.take(512), None);
            order.iter().for_each(|&i| c.give(taken[i], 256));
            assert!(c.is_unused(), "{order:?}: {:?}", c.free);
        }
    }
}
