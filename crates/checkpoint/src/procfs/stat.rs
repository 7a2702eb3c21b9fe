//! `/proc/PID/stat`.

use super::super::error::{Result, unexpected_text};
use super::read;

/// Fields of `stat` that a migration uses (`proc_pid_stat(5)`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcStat {
    /// `R`, `S`, `D`, `T`, `Z` and so on.
    pub state: char,
    /// Parent, in the reader's PID namespace, as group and session.
    pub parent: i32,
    /// Process group ID of the process.
    pub group: i32,
    /// Session ID of the process.
    pub session: i32,
    /// Start time in ticks since boot. Distinguishes processes that use the same PID one after the other.
    pub started_ticks: u64,
    /// Fields from 3 on, as numbers. Fields 26 to 28 and 45 to 52 are code, stack, data, heap, arguments,
    /// environment, exit code.
    fields: Vec<u64>,
}

impl ProcStat {
    /// Reads the file of a process.
    ///
    /// # Errors
    /// [`Error::ProcessEnded`](crate::error::Error::ProcessEnded), or a line that does not parse.
    pub fn read(pid: i32) -> Result<Self> {
        Self::parse(&read(pid, "stat")?).ok_or_else(|| unexpected_text("cannot parse stat"))
    }

    /// Returns a field by its number in the manual page, which counts from 1; 0 if absent. Only fields from 3 on are
    /// kept.
    #[must_use]
    pub fn field(&self, number: usize) -> u64 {
        number
            .checked_sub(3)
            .and_then(|at| self.fields.get(at))
            .copied()
            .unwrap_or(0)
    }

    /// Returns true if the process has ended or is exiting. An exiting process has lost its memory and files or is
    /// about to.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        /// `PF_EXITING`.
        const EXITING: u64 = 4;
        /// Number of the field with the flags.
        const FLAGS: usize = 9;
        matches!(self.state, 'Z' | 'X') || self.field(FLAGS) & EXITING != 0
    }

    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.rsplit_once(')')?;
        let words: Vec<&str> = rest.split_whitespace().collect();
        let number = |at: usize| words.get(at)?.parse::<i32>().ok();
        Some(Self {
            state: words.first()?.chars().next()?,
            parent: number(1)?,
            group: number(2)?,
            session: number(3)?,
            started_ticks: words.get(19)?.parse().ok()?,
            fields: words.iter().map(|word| word.parse().unwrap_or(0)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_name_may_contain_any_text() {
        let numbers: Vec<String> = (4..53).map(|number: i32| number.to_string()).collect();
        let stat =
            ProcStat::parse(&format!("7 (a) S (b)) R {}", numbers.join(" "))).expect("parses");
        assert_eq!(
            (stat.state, stat.parent, stat.group, stat.session),
            ('R', 4, 5, 6)
        );
        assert_eq!(
            (
                stat.started_ticks,
                stat.field(28),
                stat.field(52),
                stat.field(99)
            ),
            (22, 28, 52, 0)
        );
        assert_eq!(ProcStat::parse("7 (a) R 1"), None);
    }
}
