//! Address of the stub: a range that is free in all processes of the tree and in the restorer.

use crate::donor::free_range;
use crate::error::{Error, Result};
use crate::image::TreeLayout;
use crate::procfs;
use crate::trace::STUB_BYTES;

pub(super) fn stub_address(tree: &TreeLayout) -> Result<u64> {
    let mut used: Vec<(u64, u64)> = tree
        .processes
        .iter()
        .flat_map(|process| &process.mappings)
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    let own = procfs::mappings(std::process::id() as i32)?;
    used.extend(own.iter().map(|line| (line.start, line.end)));
    free_range::find(&used, STUB_BYTES)
        .ok_or_else(|| Error::Refused("no free address range".to_owned()))
}

/// Returns false if the original has mapped something at the stub's address.
pub(super) fn stub_is_free(tree: &TreeLayout, stub: u64) -> bool {
    let overlaps = |start: u64, end: u64| start < stub + STUB_BYTES && stub < end;
    !tree
        .processes
        .iter()
        .flat_map(|process| &process.mappings)
        .any(|mapping| overlaps(mapping.start, mapping.end))
}
