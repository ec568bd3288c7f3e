//! Instructions that Rust's library has no safe function for: memory fetched ahead of its use, and products of small matrices of
//! bytes (AMX of x86-64). The crate's only unsafe blocks.

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

/// Tells the machine that the memory `at` bytes behind the beginning of a slice will be read soon. It may lie behind the slice, or be
/// nobody's.
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

    /// The products of rows and of two times sixteen columns.
    #[inline(always)]
    pub fn multiply(&self, columns: [&TileColumns; 2], rows: &TileRows, sums: &mut [TileSums; 2]) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        amx::multiply(columns, rows, sums);
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        let _ = (columns, rows, sums);
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
    /// the third rows, the last two columns.
    #[repr(align(64))]
    #[allow(dead_code, reason = "only the machine reads it")]
    struct Shapes([u8; 64]);

    const SHAPES: Shapes = {
        let mut shapes = [0; 64];
        shapes[0] = 1;
        let registers = [(SIDE, 4 * SIDE), (SIDE, 4 * SIDE), (DEPTH / 4, 4 * SIDE), (SIDE, DEPTH), (SIDE, DEPTH)];
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

    #[inline(always)]
    pub(super) fn multiply(columns: [&TileColumns; 2], rows: &TileRows, sums: &mut [TileSums; 2]) {
        let [first, second] = sums;
        // SAFETY: the caller has [`super::Tiles`], so the registers are set up on this thread. Each is read or written whole: rows
        // are 8 times 64 bytes, columns 16 times 32 and sums 16 times 64, which are the sizes of the types. Rust's compiler uses
        // none of these registers, so nothing is lost in them.
        #[allow(unsafe_code)]
        unsafe {
            asm!(
                "tileloadd tmm2, [{rows} + {wide}]",
                "tilezero tmm0",
                "tileloadd tmm3, [{a} + {narrow}]",
                "tdpbssd tmm0, tmm3, tmm2",
                "tilezero tmm1",
                "tileloadd tmm4, [{b} + {narrow}]",
                "tdpbssd tmm1, tmm4, tmm2",
                "tilestored [{first} + {wide}], tmm0",
                "tilestored [{second} + {wide}], tmm1",
                rows = in(reg) rows,
                a = in(reg) columns[0],
                b = in(reg) columns[1],
                first = in(reg) first,
                second = in(reg) second,
                wide = in(reg) 4 * SIDE,
                narrow = in(reg) DEPTH,
                options(nostack, preserves_flags),
            );
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
        let mut sums = [TileSums([[1; SIDE]; SIDE]); 2];
        let done = Tiles::with(|tiles| {
            // Whoever sets them up in between leaves them as they are.
            assert!(Tiles::with(|_| ()).is_some());
            tiles.multiply([&columns[0], &columns[1]], &rows, &mut sums);
        });
        if done.is_none() {
            return;
        }
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
