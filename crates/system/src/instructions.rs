//! Instructions that Rust's library has no safe function for: memory fetched ahead of its use, and products of small matrices of
//! bytes (AMX of x86-64). But for calls of the C library in `allocator.rs` and `code.rs`, the crate's only unsafe blocks.

use std::marker::PhantomData;

/// Columns of a product of tiles, and its rows.
pub const SIDE: usize = 16;
/// Products in each sum of a product of tiles.
pub const DEPTH: usize = 32;

/// Sixteen columns of thirty-two bytes with a sign, one after the other.
pub type TileColumns = [u8; SIDE * DEPTH];
/// Thirty-two bytes with a sign of sixteen rows: the first four of each row, then the next four of each.
pub type TileRows = [u8; SIDE * DEPTH];
/// A sum for each column and row, of which each column's lie side by side.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct TileSums(pub [[i32; SIDE]; SIDE]);

/// Prefetches the memory `at` bytes after the beginning of a slice. The address may lie past the slice, or be unmapped.
#[inline(always)]
pub fn fetch(bytes: &[u8], at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction reads nothing that the program could see, and has no effect where there is no memory.
    #[allow(unsafe_code)]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(at).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (bytes, at);
}

/// Whether [`fetch`] speeds up sequential reads. Intel's hardware prefetcher stays within a page, and is late (Sapphire Rapids: a quarter to a
/// third faster with it); AMD's guess so well that being told only costs (Zen 4: a third slower). Others were not measured.
pub fn gains_by_fetching() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static GAINS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        *GAINS.get_or_init(|| {
            // SAFETY: every machine that this is compiled for has `cpuid`, and number 0 names the maker.
            #[allow(unsafe_code, unused_unsafe, reason = "`cpuid` is a safe function in newer versions of Rust")]
            let maker = unsafe { std::arch::x86_64::__cpuid(0) };
            [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
        })
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Registers for tiles that are set up on this thread. It stays on its thread, because they do.
pub struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// Whether the machine multiplies tiles of bytes and the system lets this process do so.
    pub fn are_there() -> bool {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        {
            static THERE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
            *THERE.get_or_init(amx::ask)
        }
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        false
    }

    /// Sets the registers up for what `work` does; `None` where there are none.
    pub fn with<T>(work: impl FnOnce(&Tiles) -> T) -> Option<T> {
        if !Tiles::are_there() {
            return None;
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        let _set_up = amx::SetUp::new();
        Some(work(&Tiles(PhantomData)))
    }

    /// Multiplies rows and two times sixteen columns. The sums stay in registers, of which there are two sets (`SET` is 0 or 1): a product
    /// takes its time, and those of another set may be stored meanwhile.
    #[inline(always)]
    pub fn multiply<const SET: usize>(&self, columns: [&TileColumns; 2], rows: &TileRows) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        amx::multiply::<SET>(columns, rows);
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        let _ = (columns, rows);
    }

    /// The sums of the last product of a set.
    #[inline(always)]
    pub fn store<const SET: usize>(&self, sums: &mut [TileSums; 2]) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        amx::store::<SET>(sums);
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        let _ = sums;
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::asm;
    use std::cell::Cell;

    use super::{DEPTH, SIDE, TileColumns, TileRows, TileSums};

    /// Asks the machine and the system.
    #[allow(unsafe_code, unused_unsafe, reason = "`cpuid` is a safe function in newer versions of Rust")]
    pub(super) fn ask() -> bool {
        const REQUEST: libc::c_long = 0x1023;
        const TILES: libc::c_long = 18;
        // SAFETY: every machine that this is compiled for has `cpuid`, and what it does not know is zero.
        let bits = unsafe {
            if std::arch::x86_64::__cpuid(0).eax < 7 {
                return false;
            }
            std::arch::x86_64::__cpuid_count(7, 0).edx
        };
        let (tiles, bytes) = (bits & 1 << 24 != 0, bits & 1 << 25 != 0);
        // SAFETY: the request has two numbers and no memory. The system knows tiles and grants them, or says no.
        tiles && bytes && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILES) } == 0
    }

    /// What the registers hold: a form (1), then two bytes each of bytes in a row, then a byte each of rows. The first two are sums,
    /// the third rows, the next two columns, the last two the other set of sums.
    #[repr(align(64))]
    #[allow(dead_code, reason = "only the machine reads it")]
    struct Shapes([u8; 64]);

    const SHAPES: Shapes = {
        let mut shapes = [0; 64];
        shapes[0] = 1;
        let (sums, rows, columns) = ((SIDE, 4 * SIDE), (DEPTH / 4, 4 * SIDE), (SIDE, DEPTH));
        let registers = [sums, sums, rows, columns, columns, sums, sums];
        let mut i = 0;
        while i < registers.len() {
            shapes[16 + 2 * i] = registers[i].1 as u8;
            shapes[48 + i] = registers[i].0 as u8;
            i += 1;
        }
        Shapes(shapes)
    };

    thread_local! {
        /// How many have set the registers of this thread up.
        static USERS: Cell<usize> = const { Cell::new(0) };
    }

    /// The registers are set up as long as this lives. It is made where there are some.
    pub(super) struct SetUp;

    impl SetUp {
        pub(super) fn new() -> SetUp {
            USERS.set(USERS.get() + 1);
            // SAFETY: the machine has the instruction and the system allows it ([`ask`]); it reads the 64 bytes of a form that is
            // described right. Rust's compiler uses none of these registers.
            #[allow(unsafe_code)]
            unsafe {
                asm!("ldtilecfg [{}]", in(reg) &SHAPES, options(nostack, readonly, preserves_flags));
            }
            SetUp
        }
    }

    impl Drop for SetUp {
        fn drop(&mut self) {
            USERS.set(USERS.get() - 1);
            if USERS.get() == 0 {
                // SAFETY: as above; it has no operands. Threads whose registers are empty are switched faster.
                #[allow(unsafe_code)]
                unsafe {
                    asm!("tilerelease", options(nostack, nomem, preserves_flags));
                }
            }
        }
    }

    /// Multiplies into two registers.
    macro_rules! multiply {
        ($first:literal, $second:literal, $columns:ident, $rows:ident) => {
            asm!(
                "tileloadd tmm2, [{rows} + {wide}]",
                concat!("tilezero ", $first),
                "tileloadd tmm3, [{a} + {narrow}]",
                concat!("tdpbssd ", $first, ", tmm3, tmm2"),
                concat!("tilezero ", $second),
                "tileloadd tmm4, [{b} + {narrow}]",
                concat!("tdpbssd ", $second, ", tmm4, tmm2"),
                rows = in(reg) $rows,
                a = in(reg) $columns[0],
                b = in(reg) $columns[1],
                wide = in(reg) 4 * SIDE,
                narrow = in(reg) DEPTH,
                options(nostack, readonly, preserves_flags),
            )
        };
    }

    #[inline(always)]
    pub(super) fn multiply<const SET: usize>(columns: [&TileColumns; 2], rows: &TileRows) {
        // SAFETY: the caller has [`super::Tiles`], so the registers are set up on this thread. Each is read whole: rows are 8 times
        // 64 bytes and columns 16 times 32, which are the sizes of the types. Rust's compiler uses none of these registers, so
        // nothing is lost in them.
        #[allow(unsafe_code)]
        unsafe {
            if SET == 0 {
                multiply!("tmm0", "tmm1", columns, rows);
            } else {
                multiply!("tmm5", "tmm6", columns, rows);
            }
        }
    }

    /// Stores two registers.
    macro_rules! store {
        ($first:literal, $second:literal, $sums:ident) => {
            asm!(
                concat!("tilestored [{first} + {wide}], ", $first),
                concat!("tilestored [{second} + {wide}], ", $second),
                first = in(reg) $sums.0,
                second = in(reg) $sums.1,
                wide = in(reg) 4 * SIDE,
                options(nostack, preserves_flags),
            )
        };
    }

    #[inline(always)]
    pub(super) fn store<const SET: usize>(sums: &mut [TileSums; 2]) {
        let [first, second] = sums;
        let sums = (first, second);
        // SAFETY: as above; sums are written whole, 16 times 64 bytes. Registers that nothing was multiplied into hold zeros.
        #[allow(unsafe_code)]
        unsafe {
            if SET == 0 {
                store!("tmm0", "tmm1", sums);
            } else {
                store!("tmm5", "tmm6", sums);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_plain_products() {
        let byte = |i: usize| (i * 7919 % 251) as u8;
        let columns: [TileColumns; 2] = [std::array::from_fn(byte), std::array::from_fn(|i| byte(i + 1000))];
        let rows: TileRows = std::array::from_fn(|i| byte(i + 77));
        let (mut sums, mut others) = ([TileSums([[1; SIDE]; SIDE]); 2], [TileSums([[1; SIDE]; SIDE]); 2]);
        let done = Tiles::with(|tiles| {
            // Code that sets them up in between leaves them set up.
            assert!(Tiles::with(|_| ()).is_some());
            tiles.multiply::<0>([&columns[0], &columns[1]], &rows);
            tiles.multiply::<1>([&columns[1], &columns[0]], &rows);
            tiles.store::<0>(&mut sums);
            tiles.store::<1>(&mut others);
        });
        if done.is_none() {
            return;
        }
        assert!(sums[0].0 == others[1].0 && sums[1].0 == others[0].0);
        for (columns, sums) in columns.iter().zip(&sums) {
            for (c, r) in (0..SIDE).flat_map(|c| (0..SIDE).map(move |r| (c, r))) {
                let column = |d: usize| i32::from(columns[c * DEPTH + d] as i8);
                let row = |d: usize| i32::from(rows[d / 4 * 4 * SIDE + 4 * r + d % 4] as i8);
                let want: i32 = (0..DEPTH).map(|d| column(d) * row(d)).sum();
                assert_eq!(sums.0[c][r], want, "column {c}, row {r}");
            }
        }
    }

    #[test]
    fn fetching_what_is_not_there_does_nothing() {
        fetch(&[1, 2, 3], 1 << 40);
    }
}
