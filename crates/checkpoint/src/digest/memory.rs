//! Checksums of mappings and their content.

use super::{DigestedPart, DigestedProcess, TreeDigest};
use crate::address_ranges::AddressRanges;
use crate::donor::{data_ranges, read_padded, scan_guards, scan_private_pages};
use crate::error::{Context, Result};
use crate::image::{MappingBacking, PAGE, ProcessLayout, ProcessState};
use crate::procfs::MapLine;
use crate::system_v_memory::MAPPED_NAME_PREFIX;
use std::fs::File;
use std::io;

/// Bytes that are read at once.
const CHUNK: u64 = 1 << 20;

const ZEROS: [u8; PAGE as usize] = [0; PAGE as usize];

/// Adds the mappings of a process. Adjacent mappings with equal properties count as one: their boundaries in the kernel
/// depend on the way in which they were made.
pub(super) fn add_mappings(digest: &mut TreeDigest, process: &ProcessLayout, lines: &[MapLine]) {
    let lines = program_mappings(process, lines);
    let process = process.pid;
    let are_mergeable = |a: &MapLine, b: &MapLine| a.end == b.start && merge_key(a) == merge_key(b);
    for lines in lines.chunk_by(are_mergeable) {
        let (start, end) = (lines[0].start, lines[lines.len() - 1].end);
        let (protection, shared, name) = merge_key(&lines[0]);
        let head = crc32c::crc32c(&[protection as u8, u8::from(shared)]);
        let part = DigestedPart::Mapping {
            process,
            start,
            end,
        };
        digest.insert(part, crc32c::crc32c_append(head, name));
    }
}

/// Returns the program's mappings, without the kernel's, and without memory that replaces the kernel's if the kernels
/// differ.
fn program_mappings(process: &ProcessLayout, lines: &[MapLine]) -> Vec<MapLine> {
    let kernels = process.mappings.iter();
    let kernels: AddressRanges = kernels
        .filter(|mapping| matches!(mapping.backing, MappingBacking::Kernel(_)))
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    let mut found = Vec::new();
    for line in lines.iter().filter(|line| !line.name.starts_with(b"[v")) {
        let line_range: AddressRanges = [(line.start, line.end)].into_iter().collect();
        for (start, end) in line_range.difference(&kernels).iter() {
            found.push(MapLine {
                start,
                end,
                ..line.clone()
            });
        }
    }
    found
}

fn merge_key(line: &MapLine) -> (i32, bool, &[u8]) {
    let name: &[u8] = match line.name.as_slice() {
        // Names that tell only the place of a mapping, which is no property of the mapping.
        b"[heap]" | b"[stack]" | b"/dev/zero" => b"",
        name if name.starts_with(MAPPED_NAME_PREFIX) => MAPPED_NAME_PREFIX,
        // A file that was removed or renamed may be shown by another name in the same directory.
        name if line.shared && name.starts_with(b"/") && !name.starts_with(b"/memfd:") => {
            let directory = name.iter().rposition(|byte| *byte == b'/');
            &name[..=directory.unwrap_or(0)]
        }
        name => name,
    };
    (line.protection, line.shared, name)
}

/// Adds the content of private mappings, page by page; a page of zeros counts as no page.
pub(super) fn add_content(
    digest: &mut TreeDigest,
    process: &ProcessLayout,
    stopped: &DigestedProcess<'_>,
) -> Result<()> {
    let path = format!("/proc/{}/pagemap", stopped.pid);
    let pagemap = File::open(&path).context(|| path)?;
    let mut buffer = vec![0; CHUNK as usize];
    let mappings = process.mappings.iter();
    let own_mappings =
        mappings.filter(|mapping| !matches!(mapping.backing, MappingBacking::Kernel(_)));
    let own_ranges = own_mappings.map(|mapping| (mapping.start, mapping.end));
    let guards = scan_guards(&pagemap, own_ranges)
        .context(|| "PAGEMAP_SCAN (requires Linux 6.7)".to_owned())?;
    let words = guards.iter().flat_map(|(start, end)| [start, end]);
    let checksum = words.fold(0, |sum, word| {
        crc32c::crc32c_append(sum, &word.to_le_bytes())
    });
    let of_process = DigestedPart::Guards {
        process: process.pid,
    };
    digest.insert(of_process, checksum);
    let known_guards: AddressRanges = process.guards.iter().copied().collect();
    for mapping in process
        .mappings
        .iter()
        .filter(|mapping| mapping.is_private())
    {
        let (start, end) = (mapping.start, mapping.end);
        let mut checksum = 0;
        for (from, to) in scan_private_pages(&pagemap, mapping)?
            .difference(&known_guards)
            .iter()
        {
            let mut at = from;
            while at < to {
                let bytes = &mut buffer[..(to - at).min(CHUNK) as usize];
                stopped.memory.read(at, bytes)?;
                zero_rseq_areas(stopped.state, at, bytes);
                checksum = checksum_pages(checksum, at, bytes);
                at += bytes.len() as u64;
            }
        }
        let process = process.pid;
        let part = DigestedPart::Content {
            process,
            start,
            end,
        };
        digest.insert(part, checksum);
    }
    Ok(())
}

/// Zeroes the areas of restartable sequences, where the kernel writes the processor of each thread.
fn zero_rseq_areas(state: &ProcessState, at: u64, bytes: &mut [u8]) {
    for area in state.threads.iter().filter_map(|thread| thread.rseq) {
        let inside = |address: u64| address.saturating_sub(at).min(bytes.len() as u64) as usize;
        let (start, end) = (
            inside(area.address),
            inside(area.address.saturating_add(area.bytes.into())),
        );
        bytes[start..end].fill(0);
    }
}

fn checksum_pages(mut checksum: u32, at: u64, bytes: &[u8]) -> u32 {
    for (number, page) in (0..).zip(bytes.chunks(PAGE as usize)) {
        if page == &ZEROS[..page.len()] {
            continue;
        }
        let page_address = at + number * PAGE;
        checksum = crc32c::crc32c_append(checksum, &page_address.to_le_bytes());
        checksum = crc32c::crc32c_append(checksum, page);
    }
    checksum
}

/// Returns the checksum of the content of shared memory.
pub(crate) fn checksum_file(file: &File) -> io::Result<u32> {
    let size = file.metadata()?.len();
    let mut buffer = vec![0; CHUNK as usize];
    let mut checksum = crc32c::crc32c(&size.to_le_bytes());
    for (from, to) in data_ranges(file, size)? {
        let mut at = from;
        while at < to {
            let bytes = &mut buffer[..(to - at).min(CHUNK) as usize];
            read_padded(file, at, bytes)?;
            checksum = checksum_pages(checksum, at, bytes);
            at += bytes.len() as u64;
        }
    }
    Ok(checksum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{Rseq, ThreadState};

    #[test]
    fn zero_page_counts_as_absent() {
        let page = vec![7; PAGE as usize];
        let behind = [ZEROS.to_vec(), page.clone()].concat();
        assert_eq!(
            checksum_pages(0, 0, &behind),
            checksum_pages(0, PAGE, &page)
        );
        assert_ne!(checksum_pages(0, 0, &page), checksum_pages(0, PAGE, &page));
    }

    #[test]
    fn rseq_areas_are_excluded() {
        let area = Rseq {
            address: 0x1f00,
            bytes: 32,
            signature: 0,
        };
        let thread = ThreadState {
            rseq: Some(area),
            ..ThreadState::default()
        };
        let state = ProcessState {
            threads: vec![thread],
            ..ProcessState::default()
        };
        let mut page = vec![1; PAGE as usize];
        zero_rseq_areas(&state, 0x1000, &mut page);
        let blank: Vec<usize> = (0..page.len()).filter(|at| page[*at] == 0).collect();
        assert_eq!(blank, (0xf00..0xf20).collect::<Vec<_>>());
        let mut other = vec![1; PAGE as usize];
        zero_rseq_areas(&state, 0x5000, &mut other);
        assert!(other.iter().all(|byte| *byte == 1));
    }
}
