//! Pages that are sent after their processes resume (post-copy): their addresses, not their content.

use super::{ADDRESS_END, MemorySpace, PAGE, PageContent, PageRun, Validate};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Most processes of a tree.
const PROCESSES_MAX: u32 = 4096;

/// Pages that are absent when the processes resume, and are sent afterwards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingPages {
    /// Processes with missing pages, in the order of the tree.
    pub processes: Vec<ProcessMissingPages>,
}

/// Missing pages of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMissingPages {
    /// Index of the process in the tree.
    pub process: u32,
    /// Address ranges (first address, and first beyond); disjoint, by address.
    pub ranges: Vec<(u64, u64)>,
}

impl MissingPages {
    /// Collects the missing pages from runs in order; runs of shared memory are left out.
    #[must_use]
    pub fn from_runs(runs: &[PageRun]) -> Self {
        let mut processes: Vec<ProcessMissingPages> = Vec::new();
        for run in runs {
            let MemorySpace::Process(process) = run.space else {
                continue;
            };
            let range = (run.start, run.start.saturating_add(run.length));
            match processes.last_mut() {
                Some(last) if last.process == process => last.ranges.push(range),
                _ => processes.push(ProcessMissingPages {
                    process,
                    ranges: vec![range],
                }),
            }
        }
        Self { processes }
    }

    /// Returns the missing ranges of a process.
    pub(crate) fn ranges_of_process(&self, process: u32) -> &[(u64, u64)] {
        let found = self.processes.iter().find(|entry| entry.process == process);
        found.map_or(&[], |process| &process.ranges)
    }

    /// Returns true if nothing is missing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty()
    }

    /// Returns the size of all missing pages, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.runs().map(|run| run.length).sum()
    }

    /// Returns the missing ranges as runs, in order.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        self.processes.iter().flat_map(|process| {
            process.ranges.iter().map(|(start, end)| PageRun {
                space: MemorySpace::Process(process.process),
                start: *start,
                length: end - start,
                content: PageContent::Bytes,
            })
        })
    }
}

impl Validate for MissingPages {
    fn check(&self) -> Result<()> {
        let is_in_order = |pair: &[ProcessMissingPages]| pair[0].process < pair[1].process;
        let is_valid = |process: &ProcessMissingPages| {
            process.process < PROCESSES_MAX && !process.ranges.is_empty()
        };
        if !self.processes.windows(2).all(is_in_order) || !self.processes.iter().all(is_valid) {
            return Err(Error::Image("invalid list of processes with missing pages"));
        }
        self.processes
            .iter()
            .try_for_each(|process| check_ranges(&process.ranges))
    }
}

fn check_ranges(ranges: &[(u64, u64)]) -> Result<()> {
    let mut at = 0;
    for (start, end) in ranges {
        if *start < at || start >= end || *end > ADDRESS_END || (start | end) % PAGE != 0 {
            return Err(Error::Image("invalid range of missing pages"));
        }
        at = *end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{decode, encode};
    use super::*;
    use proptest::prelude::*;

    fn process_missing(process: u32, ranges: &[(u64, u64)]) -> ProcessMissingPages {
        let ranges = ranges.iter().map(|(a, b)| (a * PAGE, b * PAGE)).collect();
        ProcessMissingPages { process, ranges }
    }

    #[test]
    fn missing_pages_survive_encoding() {
        let processes = vec![
            process_missing(0, &[(1, 3), (3, 4)]),
            process_missing(7, &[(9, 10)]),
        ];
        let missing = MissingPages { processes };
        let bytes = encode(&missing).expect("encodes");
        assert_eq!(decode::<MissingPages>(&bytes).expect("decodes"), missing);
        assert_eq!(missing.bytes(), 4 * PAGE);
    }

    #[test]
    fn invalid_missing_pages_are_refused() {
        let invalid = [
            vec![process_missing(1, &[(1, 2)]), process_missing(1, &[(2, 3)])],
            vec![process_missing(0, &[])],
            vec![process_missing(5000, &[(1, 2)])],
            vec![process_missing(0, &[(2, 3), (1, 2)])],
            vec![process_missing(0, &[(2, 2)])],
            vec![process_missing(0, &[(1, 1 << 40)])],
        ];
        for processes in invalid {
            let bytes = encode(&MissingPages { processes }).expect("encodes");
            assert!(decode::<MissingPages>(&bytes).is_err());
        }
    }

    proptest! {
        #[test]
        fn random_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<MissingPages>(&bytes);
        }
    }
}
