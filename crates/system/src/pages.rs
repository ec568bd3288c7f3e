//! Large memory that is filled once and then read again and again, as weights are. Huge pages are requested where the system has them: with
//! pages of 4 KiB, sequential reads wait for the address translation of every next page.

use std::fmt;

use memmap2::MmapMut;

/// Zeros that may be written to, beginning at a page.
pub struct Pages(MmapMut);

impl Pages {
    /// `bytes` bytes, at least one; `None` if the system has none. They take memory when they are first written to.
    pub fn new(bytes: usize) -> Option<Pages> {
        let map = MmapMut::map_anon(bytes.max(1)).ok()?;
        // A system without huge pages has small ones.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Some(Pages(map))
    }

    /// What they hold.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// What they hold, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of pages", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zeros_that_keep_what_is_written() {
        let mut pages = Pages::new(3 << 20).expect("some memory");
        assert_eq!(pages.bytes().len(), 3 << 20);
        assert!(pages.bytes().iter().all(|byte| *byte == 0) && pages.bytes().as_ptr().addr().is_multiple_of(4096));
        pages.bytes_mut()[(3 << 20) - 1] = 7;
        assert_eq!(pages.bytes().last(), Some(&7));
        assert!(Pages::new(usize::MAX).is_none());
    }
}
