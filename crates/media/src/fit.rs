//! A picture brought to a size: stretched, or centred on a colour with its ratio kept.

use crate::filters::{Filter, stretched};
use crate::picture::Picture;
use crate::sizes::Size;

/// How a picture comes to lie in the size that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placing {
    /// Stretched: the ratio changes.
    Stretch,
    /// In the middle of this colour; sides are rounded up.
    Pad([u8; 3]),
    /// The same with sides and margins rounded to the nearest.
    PadNearest([u8; 3]),
}

/// Filter and placing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// How pixels between pixels are found.
    pub filter: Filter,
    /// How the picture lies in the new size.
    pub placing: Placing,
}

impl Fit {
    /// Stretched with this filter.
    pub fn stretch(filter: Filter) -> Fit {
        Fit { filter, placing: Placing::Stretch }
    }

    /// In the middle of black.
    pub fn pad(filter: Filter) -> Fit {
        Fit { filter, placing: Placing::Pad([0; 3]) }
    }

    /// The picture in this size.
    pub fn to(self, picture: &Picture, size: Size) -> Picture {
        let old = picture.size();
        if old == size {
            return picture.clone();
        }
        let (colour, nearest) = match self.placing {
            Placing::Stretch => return stretched(picture, self.filter, size),
            Placing::Pad(colour) => (colour, false),
            Placing::PadNearest(colour) => (colour, true),
        };
        let scale = (size.width as f32 / old.width as f32).min(size.height as f32 / old.height as f32);
        let side = |old: usize, most: usize| {
            let scaled = old as f32 * scale;
            let whole = if nearest { scaled.round() } else { scaled.ceil() };
            (whole as usize).clamp(1, most)
        };
        let inner = Size { width: side(old.width, size.width), height: side(old.height, size.height) };
        let margin =
            |outer: usize, inner: usize| if nearest { (outer - inner).div_ceil(2) } else { (outer - inner) / 2 };
        let at = [margin(size.width, inner.width), margin(size.height, inner.height)];
        let mut whole = Picture::filled(size, colour);
        whole.paste(&stretched(picture, self.filter, inner), at);
        whole
    }
}
