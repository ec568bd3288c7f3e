//! Single instructions of AVX-512 (with VNNI, VBMI and GFNI) that `cpu_spans.rs` and its formats are made of, as functions that can
//! be called wherever there is a token for them.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi64_si128, _mm_gf2p8affine_epi64_epi8, _mm_or_si128, _mm_set_epi64x, _mm_set1_epi32,
    _mm_srlv_epi32, _mm_unpacklo_epi8, _mm256_cvtepu16_epi32, _mm256_set1_epi16, _mm256_set1_epi32, _mm512_add_epi8,
    _mm512_add_epi32, _mm512_and_si512, _mm512_castsi256_si512, _mm512_castsi512_si256, _mm512_cvtepi8_epi32,
    _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtph_ps, _mm512_dpbusd_epi32, _mm512_gf2p8affine_epi64_epi8,
    _mm512_mask_add_epi8, _mm512_mask_blend_epi16, _mm512_mask_sub_epi8, _mm512_maskz_permutex2var_epi8,
    _mm512_multishift_epi64_epi8, _mm512_or_si512, _mm512_permutex2var_epi8, _mm512_permutex2var_epi16,
    _mm512_permutexvar_epi8, _mm512_permutexvar_ps, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_epi64,
    _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_slli_epi16, _mm512_slli_epi32, _mm512_sub_epi32,
    _mm512_ternarylogic_epi32, _mm512_test_epi8_mask, _mm512_xor_si512, _pdep_u64, _pext_u64,
};

use fearless_simd::prelude::*;
use fearless_simd::{Avx512, f32x16, i32x16, u8x16, u8x32, u8x64, u16x32, u32x4, u64x2, u64x8};

/// Declares functions of a token that are an instruction or two each.
macro_rules! instructions {
    ($($(#[$meta:meta])* fn $name:ident($simd:ident $(, $arg:ident : $ty:ty)*) -> $result:ty { $($body:tt)* })*) => {
        $(
            fearless_simd::kernel!(
                $(#[$meta])*
                #[inline(always)]
                pub(super) fn $name($simd: Avx512 $(, $arg: $ty)*) -> $result { $($body)* }
            );
        )*
    };
}

/// The matrix that makes [`bits`] of a byte: `count` of them from bit `from` on, which come to lie from bit `to` on.
pub(super) const fn take(from: usize, count: usize, to: usize) -> u64 {
    let (mut matrix, mut i) = (0, 0);
    while i < count {
        // The row of bit 7 is the lowest byte.
        matrix |= (1 << (from + i)) << (8 * (7 - to - i));
        i += 1;
    }
    matrix
}

instructions! {
    /// Adds to each number the products of four bytes and four bytes with a sign.
    fn dot(simd, sum: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        _mm512_dpbusd_epi32(sum, codes, x)
    }

    /// 128 times each number.
    fn by_128(simd, x: __m512i) -> __m512i {
        _mm512_slli_epi32::<7>(x)
    }

    fn sum(simd, a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(a, b)
    }

    /// Bytes of two vectors.
    fn pick_bytes_of_two(simd, which: &[u8; 64], a: __m512i, b: __m512i) -> __m512i {
        _mm512_permutex2var_epi8(a, u8x64::load_array_ref(simd, which).into(), b)
    }

    fn zeros(simd) -> __m512i {
        _mm512_setzero_si512()
    }

    fn to_floats(simd, x: __m512i) -> f32x16<Avx512> {
        _mm512_cvtepi32_ps(x).simd_into(simd)
    }

    /// Number `which(i)` of x, for every i.
    fn pick(simd, which: &[i32; 16], x: f32x16<Avx512>) -> f32x16<Avx512> {
        _mm512_permutexvar_ps(i32x16::load_array_ref(simd, which).into(), x.into()).simd_into(simd)
    }

    /// Byte `which(i)` of x, for every i.
    fn pick_bytes(simd, which: &[u8; 64], x: __m512i) -> __m512i {
        _mm512_permutexvar_epi8(u8x64::load_array_ref(simd, which).into(), x)
    }

    /// Sixteen bytes as numbers, each from one of two vectors.
    fn pick_wide(simd, which: &[u8; 64], a: __m512i, b: __m512i) -> __m512i {
        _mm512_maskz_permutex2var_epi8(0x1111_1111_1111_1111, a, u8x64::load_array_ref(simd, which).into(), b)
    }

    /// Words of two vectors.
    fn pick_words(simd, which: &[u16; 32], a: __m512i, b: __m512i) -> __m512i {
        _mm512_permutex2var_epi16(a, u16x32::load_array_ref(simd, which).into(), b)
    }

    /// Words of b where a bit is set.
    fn blend_words(simd, mask: u32, a: __m512i, b: __m512i) -> __m512i {
        _mm512_mask_blend_epi16(mask, a, b)
    }

    /// The first sixteen half floats.
    fn halves(simd, words: __m512i) -> f32x16<Avx512> {
        _mm512_cvtph_ps(_mm512_castsi512_si256(words)).simd_into(simd)
    }

    /// Sixteen half floats.
    fn halves_of(simd, words: u8x32<Avx512>) -> f32x16<Avx512> {
        _mm512_cvtph_ps(words.into()).simd_into(simd)
    }

    /// Four bytes instead of every four.
    fn four_everywhere(simd, bytes: i32) -> __m512i {
        _mm512_set1_epi32(bytes)
    }

    /// One half float everywhere.
    fn half(simd, bits: u16) -> f32x16<Avx512> {
        _mm512_cvtph_ps(_mm256_set1_epi16(bits.cast_signed())).simd_into(simd)
    }

    /// Two half floats in turn.
    fn two_halves(simd, bits: u32) -> f32x16<Avx512> {
        _mm512_cvtph_ps(_mm256_set1_epi32(bits.cast_signed())).simd_into(simd)
    }

    /// Bits of every byte, moved: a matrix of [`take`] for each eight bytes.
    fn bits(simd, bytes: __m512i, matrices: &[u64; 8]) -> __m512i {
        _mm512_gf2p8affine_epi64_epi8::<0>(bytes, u64x8::load_array_ref(simd, matrices).into())
    }

    /// The same of sixteen bytes.
    fn bits_of_16(simd, bytes: __m128i, matrices: [u64; 2]) -> __m128i {
        _mm_gf2p8affine_epi64_epi8::<0>(bytes, u64x2::load_array(simd, matrices).into())
    }

    fn or(simd, a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }

    /// Every byte of a with those bits of b that a byte has.
    fn with_bits_of(simd, a: __m512i, b: __m512i, byte: u8) -> __m512i {
        _mm512_ternarylogic_epi32::<0xf8>(a, b, _mm512_set1_epi8(byte.cast_signed()))
    }

    fn and(simd, a: __m512i, byte: u8) -> __m512i {
        _mm512_and_si512(a, _mm512_set1_epi8(byte.cast_signed()))
    }

    fn xor(simd, a: __m512i, byte: u8) -> __m512i {
        _mm512_xor_si512(a, _mm512_set1_epi8(byte.cast_signed()))
    }

    fn add(simd, a: __m512i, byte: u8) -> __m512i {
        _mm512_add_epi8(a, _mm512_set1_epi8(byte.cast_signed()))
    }

    /// Adds a number to bytes where a bit is set.
    fn add_where(simd, a: __m512i, mask: u64, byte: u8) -> __m512i {
        _mm512_mask_add_epi8(a, mask, a, _mm512_set1_epi8(byte.cast_signed()))
    }

    /// What bytes below sixteen stand for.
    fn by_table(simd, table: &[u8; 16], indices: __m512i) -> __m512i {
        let table = u8x16::load_array_ref(simd, table);
        let table = table.combine(table);
        _mm512_shuffle_epi8(table.combine(table).into(), indices)
    }

    /// Sixteen bytes as numbers.
    fn wide(simd, bytes: __m128i) -> __m512i {
        _mm512_cvtepu8_epi32(bytes)
    }

    /// Sixteen bytes with signs as numbers.
    fn wide_signed(simd, bytes: __m128i) -> __m512i {
        _mm512_cvtepi8_epi32(bytes)
    }

    fn less(simd, a: __m512i, by: i32) -> __m512i {
        _mm512_sub_epi32(a, _mm512_set1_epi32(by))
    }

    /// Sixteen bytes of two numbers.
    fn pair(simd, low: u64, high: u64) -> __m128i {
        _mm_set_epi64x(high.cast_signed(), low.cast_signed())
    }

    /// Eight bytes of each of two numbers, in turn.
    fn in_turn(simd, first: u64, second: u64) -> __m128i {
        _mm_unpacklo_epi8(_mm_cvtsi64_si128(first.cast_signed()), _mm_cvtsi64_si128(second.cast_signed()))
    }

    /// Sixteen bytes of four, shifted down by a number of bits each time.
    fn shifted(simd, bytes: u32, by: &[u32; 4]) -> __m128i {
        _mm_srlv_epi32(_mm_set1_epi32(bytes.cast_signed()), u32x4::load_array_ref(simd, by).into())
    }

    fn or_16(simd, a: __m128i, b: __m128i) -> __m128i {
        _mm_or_si128(a, b)
    }

    /// Eight times each byte, none of which is larger than 31.
    fn by_eight(simd, bytes: __m512i) -> __m512i {
        _mm512_slli_epi16::<3>(bytes)
    }

    /// Bytes with a minus where a bit is set.
    fn negated(simd, bytes: __m512i, mask: u64) -> __m512i {
        _mm512_mask_sub_epi8(bytes, mask, _mm512_setzero_si512(), bytes)
    }

    /// Whether each byte has the bit of its place among eight.
    fn with_bit(simd, bytes: __m512i) -> u64 {
        _mm512_test_epi8_mask(bytes, _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed()))
    }

    /// Eight bits of the eight bytes that each byte lies in, from bit `from` on.
    fn select_bits(simd, from: &[u8; 64], bytes: __m512i) -> __m512i {
        _mm512_multishift_epi64_epi8(u8x64::load_array_ref(simd, from).into(), bytes)
    }

    /// Eight words as numbers; eight more hold anything.
    fn wide_words(simd, words: __m128i) -> __m512i {
        _mm512_castsi256_si512(_mm256_cvtepu16_epi32(words))
    }

    /// The bits of a number that a mask has, from the lowest on.
    fn gathered(simd, bits: u64, mask: u64) -> u64 {
        _pext_u64(bits, mask)
    }

    /// The bits of a number, from the lowest on, in the places that a mask has.
    fn spread(simd, bits: u64, mask: u64) -> u64 {
        _pdep_u64(bits, mask)
    }
}

/// Sixty-four bytes from `at` on.
#[inline(always)]
pub(super) fn load(simd: Avx512, run: &[u8], at: usize) -> __m512i {
    u8x64::load_array_ref(simd, run[at..].first_chunk().expect("sixty-four bytes")).into()
}

/// Thirty-two bytes from `at` on, twice.
#[inline(always)]
pub(super) fn load_twice(simd: Avx512, run: &[u8], at: usize) -> __m512i {
    let bytes = u8x32::load_array_ref(simd, run[at..].first_chunk().expect("thirty-two bytes"));
    bytes.combine(bytes).into()
}

/// Thirty-two bytes from each of two places on.
#[inline(always)]
pub(super) fn load_two(simd: Avx512, run: &[u8], a: usize, b: usize) -> __m512i {
    let first = u8x32::load_array_ref(simd, run[a..].first_chunk().expect("thirty-two bytes"));
    first.combine(u8x32::load_array_ref(simd, run[b..].first_chunk().expect("thirty-two bytes"))).into()
}

/// Sixteen bytes from `at` on.
#[inline(always)]
pub(super) fn load_16(simd: Avx512, run: &[u8], at: usize) -> __m128i {
    u8x16::load_array_ref(simd, run[at..].first_chunk().expect("sixteen bytes")).into()
}

#[inline(always)]
pub(super) fn word(run: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*run[at..].first_chunk().expect("two bytes"))
}

#[inline(always)]
pub(super) fn four(run: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*run[at..].first_chunk().expect("four bytes"))
}

#[inline(always)]
pub(super) fn eight(run: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*run[at..].first_chunk().expect("eight bytes"))
}
