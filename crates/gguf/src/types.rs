//! The tensor types of GGUF: one table row each. What the bits of a block mean lives in [`crate::quant`].

/// One row of the table: what every part of Kiln may know about a tensor type.
struct Row {
    ty: TensorType,
    id: u32,
    name: &'static str,
    /// Elements in a block; 1 for plain types.
    block_len: usize,
    /// Bytes of a block.
    block_bytes: usize,
    /// The type whose blocks are packed here; the type itself for those of files.
    base: TensorType,
}

macro_rules! tensor_types {
    (
        files { $($variant:ident = $id:literal, $name:literal, $len:literal, $bytes:literal;)* }
        devices { $($packed:ident of $base:ident, $number:literal, $packed_name:literal, $packed_len:literal, $packed_bytes:literal;)* }
    ) => {
        /// A tensor type of GGUF, or one that devices alone know ([`TensorType::PACKED`]). The discriminants are the ids
        /// in the file.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, non_camel_case_types, reason = "the names are the format's own")]
        #[repr(u32)]
        pub enum TensorType { $($variant = $id,)* $($packed = NO_FILE + $number),* }

        const TABLE: &[Row] = &[
            $(Row {
                ty: TensorType::$variant,
                id: $id,
                name: $name,
                block_len: $len,
                block_bytes: $bytes,
                base: TensorType::$variant,
            },)*
            $(Row {
                ty: TensorType::$packed,
                id: NO_FILE + $number,
                name: $packed_name,
                block_len: $packed_len,
                block_bytes: $packed_bytes,
                base: TensorType::$base,
            }),*
        ];

        impl TensorType {
            /// Every type of files, in order of id.
            pub const ALL: &[TensorType] = &[$(TensorType::$variant),*];

            /// Every type that is no file's: blocks of another type, packed for a device by
            /// [`pack`](crate::quant::pack).
            pub const PACKED: &[TensorType] = &[$(TensorType::$packed),*];
        }
    };
}

/// From here on numbers are no ids of files.
const NO_FILE: u32 = 1 << 31;

tensor_types! {
    files {
    // variant = id, name, elements per block, bytes per block
    F32 = 0, "F32", 1, 4;
    F16 = 1, "F16", 1, 2;
    Q4_0 = 2, "Q4_0", 32, 18;
    Q4_1 = 3, "Q4_1", 32, 20;
    Q5_0 = 6, "Q5_0", 32, 22;
    Q5_1 = 7, "Q5_1", 32, 24;
    Q8_0 = 8, "Q8_0", 32, 34;
    Q8_1 = 9, "Q8_1", 32, 36;
    Q2_K = 10, "Q2_K", 256, 84;
    Q3_K = 11, "Q3_K", 256, 110;
    Q4_K = 12, "Q4_K", 256, 144;
    Q5_K = 13, "Q5_K", 256, 176;
    Q6_K = 14, "Q6_K", 256, 210;
    Q8_K = 15, "Q8_K", 256, 292;
    IQ2_XXS = 16, "IQ2_XXS", 256, 66;
    IQ2_XS = 17, "IQ2_XS", 256, 74;
    IQ3_XXS = 18, "IQ3_XXS", 256, 98;
    IQ1_S = 19, "IQ1_S", 256, 50;
    IQ4_NL = 20, "IQ4_NL", 32, 18;
    IQ3_S = 21, "IQ3_S", 256, 110;
    IQ2_S = 22, "IQ2_S", 256, 82;
    IQ4_XS = 23, "IQ4_XS", 256, 136;
    I8 = 24, "I8", 1, 1;
    I16 = 25, "I16", 1, 2;
    I32 = 26, "I32", 1, 4;
    I64 = 27, "I64", 1, 8;
    F64 = 28, "F64", 1, 8;
    IQ1_M = 29, "IQ1_M", 256, 56;
    BF16 = 30, "BF16", 1, 2;
    TQ1_0 = 34, "TQ1_0", 256, 54;
    TQ2_0 = 35, "TQ2_0", 256, 66;
    MXFP4 = 39, "MXFP4", 32, 17;
    NVFP4 = 40, "NVFP4", 64, 36;
    Q1_0 = 41, "Q1_0", 128, 18;
    Q2_0 = 42, "Q2_0", 64, 18;
    }
    devices {
    // variant of type, number, name, elements per block, bytes per block
    Q4_0x8 of Q4_0, 0, "Q4_0x8", 256, 144;
    Q8_0x8 of Q8_0, 1, "Q8_0x8", 256, 272;
    Q4_1x4 of Q4_1, 2, "Q4_1x4", 128, 80;
    Q5_0x8 of Q5_0, 3, "Q5_0x8", 256, 176;
    Q5_1x4 of Q5_1, 4, "Q5_1x4", 128, 96;
    IQ4_NLx8 of IQ4_NL, 5, "IQ4_NLx8", 256, 144;
    Q3_Kx1 of Q3_K, 6, "Q3_Kx1", 256, 112;
    // The same with more and more bytes unused, for rows of other lengths; the first one that fits is taken.
    Q6_Kx8 of Q6_K, 7, "Q6_Kx8", 2048, 1680;
    Q6_Kx2 of Q6_K, 8, "Q6_Kx2", 512, 432;
    Q6_Kx1 of Q6_K, 9, "Q6_Kx1", 256, 224;
    MXFP4x16 of MXFP4, 10, "MXFP4x16", 512, 272;
    // For rows of 2880, which are no whole number of 256.
    MXFP4x30 of MXFP4, 11, "MXFP4x30", 960, 512;
    NVFP4x4 of NVFP4, 12, "NVFP4x4", 256, 144;
    }
}

impl TensorType {
    fn row(self) -> &'static Row {
        TABLE.iter().find(|row| row.ty == self).expect("every variant should have its row: one macro makes both")
    }

    /// The type with this id in a file, if Kiln knows it.
    pub fn from_id(id: u32) -> Option<TensorType> {
        TABLE.iter().find(|row| row.id == id && id < NO_FILE).map(|row| row.ty)
    }

    /// The type of files with this name, in any case (`q4_k`, `Q4_K`).
    pub fn from_name(name: &str) -> Option<TensorType> {
        TensorType::ALL.iter().copied().find(|ty| ty.name().eq_ignore_ascii_case(name))
    }

    /// Whether devices alone know this type.
    pub fn is_packed(self) -> bool {
        self as u32 >= NO_FILE
    }

    /// The type of files that holds the same values: the type itself unless it is packed.
    pub fn base(self) -> TensorType {
        self.row().base
    }

    /// The id in a file.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// The name as users write it.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Elements in a block; 1 for plain types.
    pub fn block_len(self) -> usize {
        self.row().block_len
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.row().block_bytes
    }

    /// Whether several elements share a block.
    pub fn is_quantised(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of a row of `len` elements, or `None` where `len` is no whole number of blocks or the size overflows.
    pub fn row_bytes(self, len: usize) -> Option<usize> {
        len.is_multiple_of(self.block_len()).then(|| (len / self.block_len()).checked_mul(self.block_bytes())).flatten()
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_lead_back_to_their_type() {
        for &ty in TensorType::ALL {
            assert_eq!(TensorType::from_id(ty.id()), Some(ty));
            assert_eq!(TensorType::from_name(&ty.name().to_lowercase()), Some(ty));
        }
        for &ty in TensorType::PACKED {
            assert_eq!((TensorType::from_id(ty.id()), TensorType::from_name(ty.name())), (None, None), "{ty}");
            assert!(ty.is_packed() && !ty.base().is_packed() && ty.block_len().is_multiple_of(ty.base().block_len()));
        }
        for removed in [4, 5, 31, 32, 33, 36, 37, 38, 43] {
            assert_eq!(TensorType::from_id(removed), None);
        }
    }
}
