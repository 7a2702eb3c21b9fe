//! Pages that are sent after their processes resume (post-copy): their addresses, not their content.

use super::{ADDRESS_END, Checked, Content, PAGE, Run, Space};
use crate::process::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Most processes of a tree.
const PROCESSES_MAX: u32 = 4096;

/// Pages that are absent when the processes resume, and are sent afterwards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Processes with missing pages, in the order of the tree.
    pub processes: Vec<MissingOf>,
}

/// Missing pages of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingOf {
    /// Index of the process in the tree.
    pub process: u32,
    /// Address ranges (first address, and first beyond); disjoint, by address.
    pub ranges: Vec<(u64, u64)>,
}

impl Missing {
    /// Collects the missing pages from runs in order; runs of shared memory are left out.
    #[must_use]
    pub fn of(runs: &[Run]) -> Self {
        let mut processes: Vec<MissingOf> = Vec::new();
        for run in runs {
            let Space::Process(process) = run.space else {
                continue;
            };
            let range = (run.start, run.start.saturating_add(run.length));
            match processes.last_mut() {
                Some(last) if last.process == process => last.ranges.push(range),
                _ => processes.push(MissingOf {
                    process,
                    ranges: vec![range],
                }),
            }
        }
        Self { processes }
    }

    /// Returns the missing ranges of a process.
    pub(crate) fn of_process(&self, process: u32) -> &[(u64, u64)] {
        let found = self.processes.iter().find(|of| of.process == process);
        found.map_or(&[], |of| &of.ranges)
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
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.processes.iter().flat_map(|of| {
            of.ranges.iter().map(|(start, end)| Run {
                space: Space::Process(of.process),
                start: *start,
                length: end - start,
                content: Content::Bytes,
            })
        })
    }
}

impl Checked for Missing {
    fn check(&self) -> Result<()> {
        let in_order = |pair: &[MissingOf]| pair[0].process < pair[1].process;
        let known = |of: &MissingOf| of.process < PROCESSES_MAX && !of.ranges.is_empty();
        if !self.processes.windows(2).all(in_order) || !self.processes.iter().all(known) {
            return Err(Error::Image("processes that lack memory"));
        }
        self.processes.iter().try_for_each(|of| check(&of.ranges))
    }
}

fn check(ranges: &[(u64, u64)]) -> Result<()> {
    let mut at = 0;
    for (start, end) in ranges {
        if *start < at || start >= end || *end > ADDRESS_END || (start | end) % PAGE != 0 {
            return Err(Error::Image("a place of memory that follows"));
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

    fn of(process: u32, ranges: &[(u64, u64)]) -> MissingOf {
        let ranges = ranges.iter().map(|(a, b)| (a * PAGE, b * PAGE)).collect();
        MissingOf { process, ranges }
    }

    #[test]
    fn it_goes_round_and_counts_its_bytes() {
        let processes = vec![of(0, &[(1, 3), (3, 4)]), of(7, &[(9, 10)])];
        let missing = Missing { processes };
        let bytes = encode(&missing).expect("encodes");
        assert_eq!(decode::<Missing>(&bytes).expect("decodes"), missing);
        assert_eq!(missing.bytes(), 4 * PAGE);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let wrong = [
            vec![of(1, &[(1, 2)]), of(1, &[(2, 3)])],
            vec![of(0, &[])],
            vec![of(5000, &[(1, 2)])],
            vec![of(0, &[(2, 3), (1, 2)])],
            vec![of(0, &[(2, 2)])],
            vec![of(0, &[(1, 1 << 40)])],
        ];
        for processes in wrong {
            let bytes = encode(&Missing { processes }).expect("encodes");
            assert!(decode::<Missing>(&bytes).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<Missing>(&bytes);
        }
    }
}
