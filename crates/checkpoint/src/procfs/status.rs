//! `/proc/PID/status`.

use super::super::error::{Error, Result, unexpected_text};
use super::read;

/// Lines of `status` that a migration uses or that tell if a thread can move (`proc_pid_status(5)`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcStatus {
    /// PID or TID in each namespace: the reader's first, the thread's own last.
    pub ids: Vec<i32>,
    /// PID of the thread's process in each namespace.
    pub process_ids: Vec<i32>,
    /// Process group in each namespace.
    pub group_ids: Vec<i32>,
    /// Session in each namespace.
    pub session_ids: Vec<i32>,
    /// PID of the tracer, 0 for none.
    pub tracer: i32,
    /// Real, effective, saved, filesystem.
    pub uids: [u32; 4],
    /// Real, effective, saved, filesystem.
    pub gids: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Inheritable, permitted, effective, bounding, ambient.
    pub capabilities: [u64; 5],
    /// Pending for the thread, pending for the process, blocked, ignored, caught.
    pub signals: [u64; 5],
    /// File mode creation mask.
    pub umask: u32,
    /// `no_new_privs`.
    pub no_new_privileges: bool,
    /// Mode of seccomp: 0 none, 1 strict, 2 filters.
    pub seccomp: u32,
    /// Number of seccomp filters.
    pub seccomp_filters: u32,
    /// True if features of control-flow enforcement (shadow stack) are on.
    pub control_flow: bool,
    /// True if the thread has forbidden the processor to speculate (`PR_SET_SPECULATION_CTRL`).
    pub forbids_speculation: bool,
    /// Number of threads of the process.
    pub threads: u32,
}

impl ProcStatus {
    /// Reads the file of a thread.
    ///
    /// # Errors
    /// [`Error::ProcessEnded`], or lines that do not parse.
    pub fn read(pid: i32, tid: i32) -> Result<Self> {
        let text = read(pid, &format!("task/{tid}/status"))?;
        Self::parse_thread(tid, &text)
    }

    /// Parses the text. A thread that ends while the kernel writes the text has no ID in it, and counts as ended.
    fn parse_thread(tid: i32, text: &str) -> Result<Self> {
        let status = Self::parse(text).ok_or_else(|| unexpected_text("cannot parse status"))?;
        match status.innermost_id() {
            0 => Err(Error::ProcessEnded(tid)),
            _ => Ok(status),
        }
    }

    /// Returns the ID in the thread's own PID namespace.
    #[must_use]
    pub fn innermost_id(&self) -> i32 {
        self.ids.last().copied().unwrap_or(0)
    }

    fn parse(text: &str) -> Option<Self> {
        let lines: Vec<(&str, &str)> = text
            .lines()
            .filter_map(|line| line.split_once(':'))
            .collect();
        // A freeze may read the files of 100 threads, and searching so few lines is faster than hashing them.
        let line = |name: &str| lines.iter().find(|(label, _)| *label == name);
        let words = |name: &str| line(name).map_or("", |(_, line)| line.trim());
        let numbers = |name: &str| -> Option<Vec<i32>> {
            words(name)
                .split_whitespace()
                .map(|word| word.parse().ok())
                .collect()
        };
        let four = |name: &str| -> Option<[u32; 4]> {
            let found: Option<Vec<u32>> = words(name)
                .split_whitespace()
                .map(|word| word.parse().ok())
                .collect();
            found?.try_into().ok()
        };
        let hex = |name: &str| u64::from_str_radix(words(name), 16).ok();
        let groups: Option<Vec<u32>> = words("Groups")
            .split_whitespace()
            .map(|word| word.parse().ok())
            .collect();
        Some(Self {
            ids: numbers("NSpid")?,
            process_ids: numbers("NStgid")?,
            group_ids: numbers("NSpgid")?,
            session_ids: numbers("NSsid")?,
            tracer: words("TracerPid").parse().ok()?,
            uids: four("Uid")?,
            gids: four("Gid")?,
            groups: groups?,
            capabilities: [
                hex("CapInh")?,
                hex("CapPrm")?,
                hex("CapEff")?,
                hex("CapBnd")?,
                hex("CapAmb")?,
            ],
            signals: [
                hex("SigPnd")?,
                hex("ShdPnd")?,
                hex("SigBlk")?,
                hex("SigIgn")?,
                hex("SigCgt")?,
            ],
            umask: u32::from_str_radix(words("Umask"), 8).unwrap_or(0o022),
            no_new_privileges: words("NoNewPrivs") == "1",
            seccomp: words("Seccomp").parse().unwrap_or(0),
            seccomp_filters: words("Seccomp_filters").parse().unwrap_or(0),
            control_flow: !words("x86_Thread_features").is_empty(),
            forbids_speculation: words("Speculation_Store_Bypass").ends_with(" mitigated")
                && words("Speculation_Store_Bypass").starts_with("thread ")
                || words("SpeculationIndirectBranch").starts_with("conditional ")
                    && words("SpeculationIndirectBranch").ends_with(" disabled"),
            threads: words("Threads").parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_status_parses() {
        let pid = std::process::id() as i32;
        let status = ProcStatus::read(pid, pid).expect("parses");
        assert_eq!(
            status.innermost_id(),
            *status.process_ids.last().expect("one")
        );
        assert!(status.threads >= 1);
        assert_eq!(ProcStatus::parse("Uid:\t1\n"), None);
    }

    #[test]
    fn status_without_an_id_means_the_thread_ended() {
        let text = std::fs::read_to_string("/proc/self/status").expect("there");
        assert!(ProcStatus::parse_thread(5, &text).is_ok());
        let own_ids = ProcStatus::parse(&text).expect("parses").ids;
        let id_texts: Vec<String> = own_ids.iter().map(ToString::to_string).collect();
        let line = format!("NSpid:\t{}", id_texts.join("\t"));
        let ended = text.replace(&line, "NSpid:\t0");
        assert!(matches!(
            ProcStatus::parse_thread(5, &ended),
            Err(Error::ProcessEnded(5))
        ));
    }
}
