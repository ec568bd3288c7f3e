//! The definition of `group_norm`: that of `norm`, a group being a row.

pub(crate) use crate::norm::reference::standardise;
