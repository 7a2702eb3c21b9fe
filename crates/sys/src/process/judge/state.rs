//! Judgement of the state of processes and threads.

use super::here::RESOURCES;
use super::{Judge, Verdict, refuse, require};
use crate::process::image::{
    Credentials, Frozen, FrozenProcess, FrozenThread, IntervalTimer, Limit, MemoryFields,
    PosixTimer, Rseq, Scheduling, SignalInfo,
};

/// `SECBIT_KEEP_CAPS`, which any process may set, and which means nothing without capabilities.
const KEEP_CAPS: u32 = 1 << 4;
/// Clocks that wake the machine, which requires `CAP_WAKE_ALARM`.
pub(super) const ALARM_CLOCKS: [i32; 2] = [libc::CLOCK_REALTIME_ALARM, libc::CLOCK_BOOTTIME_ALARM];
/// `SCHED_EXT`.
const SCHED_EXT: i32 = 7;
/// `IOPRIO_CLASS_RT`, and the lowest bit of the class in an I/O priority.
const IO_REALTIME: u32 = 1;
const IO_CLASS_SHIFT: u32 = 13;
/// Nice value that corresponds to 0 in `RLIMIT_NICE`.
const NICE_FROM: i64 = 20;

impl Judge {
    /// Checks the state of processes.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn frozen(&self, frozen: &Frozen) -> Verdict {
        let Frozen { processes } = frozen;
        processes
            .iter()
            .flatten()
            .try_for_each(|process| self.process_state(process))
    }

    fn process_state(&self, process: &FrozenProcess) -> Verdict {
        let FrozenProcess {
            threads,
            // A process may set its own state to anything: handlers, signals to itself, memory, and settings
            // of these that the process itself passes to the kernel, with its own rights.
            actions: _,
            pending,
            interval_timers,
            posix_timers,
            memory:
                MemoryFields {
                    addresses: _,
                    auxiliary: _,
                },
            limits,
            umask: _,
            // The directory is entered with the rights of the process, or is below a directory of the policy.
            directory: _,
            stopped: _,
            stop_untold: _,
            dumpable: _,
            child_subreaper: _,
            huge_pages_off: _,
            no_new_code: _,
            merges: _,
            // Locked memory is within `RLIMIT_MEMLOCK`, which the kernel checks when the process locks its memory.
            locks: _,
            barriers: _,
            oom_score_adjustment,
            dump_filter: _,
        } = process;
        threads.iter().try_for_each(|thread| self.thread(thread))?;
        if self.allowed.has_root() {
            return Ok(());
        }
        for SignalInfo(_) in pending {}
        for IntervalTimer {
            interval_us: _,
            left_us: _,
        } in interval_timers
        {}
        for timer in posix_timers {
            let PosixTimer {
                id,
                clock,
                notify: _,
                signal: _,
                value: _,
                thread: _,
                interval_ns: _,
                left_ns: _,
            } = timer;
            require(!ALARM_CLOCKS.contains(clock), || {
                format!("its timer {id} wakes the machine (clock {clock})")
            })?;
        }
        self.limits(limits)?;
        let least = self.here.oom_score_adjustment;
        require(*oom_score_adjustment >= least, || {
            format!(
                "its oom_score_adj is {oom_score_adjustment}, below the {least} of processes here"
            )
        })
    }

    fn limits(&self, limits: &[Limit]) -> Verdict {
        require(limits.len() == RESOURCES, || {
            format!("it has {} limits of {RESOURCES}", limits.len())
        })?;
        for (resource, (limit, most)) in limits.iter().zip(&self.here.limits).enumerate() {
            let Limit { soft, hard } = limit;
            require(soft <= hard && hard <= most, || {
                let name = NAMES.get(resource).unwrap_or(&"a resource");
                format!(
                    "its limit RLIMIT_{name} is {soft} (hard {hard}), above the hard limit {most} here"
                )
            })?;
        }
        Ok(())
    }

    fn thread(&self, thread: &FrozenThread) -> Verdict {
        let FrozenThread {
            // Registers are computation state; the kernel lets no register give rights.
            registers: _,
            extended: _,
            mask: _,
            pending,
            // Addresses in the process's own memory, which the kernel uses with the thread's own rights.
            alternate_stack: _,
            robust_list: _,
            clear_tid: _,
            rseq,
            name: _,
            credentials,
            scheduling,
            parent_death_signal: _,
            timer_slack_ns: _,
            // The thread itself sets its personality.
            personality: _,
            io_priority,
            time_stamps: _,
            machine_checks: _,
            no_new_privileges,
            filters,
        } = thread;
        self.credentials(credentials)?;
        if self.allowed.has_root() {
            return Ok(());
        }
        for SignalInfo(_) in pending {}
        if let Some(Rseq {
            address: _,
            bytes: _,
            signature: _,
        }) = rseq
        {}
        // A filter may report success for a call that was not made, and so deceive a program with another user's
        // rights.
        require(*no_new_privileges || filters.is_empty(), || {
            "a thread has seccomp filters without no_new_privs".to_owned()
        })?;
        self.scheduling(scheduling)?;
        require(io_priority >> IO_CLASS_SHIFT != IO_REALTIME, || {
            "a thread has the real-time class of I/O priority".to_owned()
        })
    }

    pub(super) fn credentials(&self, credentials: &Credentials) -> Verdict {
        let Credentials {
            uids,
            gids,
            groups,
            capabilities: [inheritable, permitted, effective, bounding, ambient],
            secure_bits,
        } = credentials;
        uids.iter().try_for_each(|user| self.user(*user))?;
        self.groups(gids.iter().chain(groups))?;
        if self.allowed.has_root() {
            return Ok(());
        }
        if (permitted | effective | ambient) != 0 {
            return refuse("it has capabilities");
        }
        // With inheritable capabilities, a program gains capabilities that its file has.
        if *inheritable != 0 {
            return refuse("it has inheritable capabilities");
        }
        // The bounding set never exceeds the daemon's own: bits are removed from that set, and none is added.
        let _ = bounding;
        // A program with another user's rights relies on the kernel's ordinary rules.
        require(secure_bits & !KEEP_CAPS == 0, || {
            format!("it has securebits {secure_bits:#x}")
        })
    }

    fn scheduling(&self, scheduling: &Scheduling) -> Verdict {
        let Scheduling {
            policy,
            // Only the flag that takes rights away from children is used.
            flags: _,
            nice,
            priority,
            // The times of an ordinary policy are a slice.
            times_ns: _,
            affinity: _,
        } = scheduling;
        match policy.cast_signed() {
            libc::SCHED_OTHER | libc::SCHED_BATCH | libc::SCHED_IDLE | SCHED_EXT => {}
            libc::SCHED_FIFO | libc::SCHED_RR => {
                let most = self.here.limit(libc::RLIMIT_RTPRIO);
                require(u64::from(*priority) <= most, || {
                    format!(
                        "a thread has real-time priority {priority}, of at most {most} here (RLIMIT_RTPRIO)"
                    )
                })?;
            }
            _ => return refuse(format!("a thread has scheduling policy {policy}")),
        }
        let most = i64::try_from(self.here.limit(libc::RLIMIT_NICE)).unwrap_or(i64::MAX);
        let least = NICE_FROM.saturating_sub(most).min(0);
        require(i64::from(*nice) >= least, || {
            format!("a thread has nice value {nice}, of at least {least} here (RLIMIT_NICE)")
        })
    }
}

/// Names of resources, by number.
const NAMES: [&str; RESOURCES] = [
    "CPU",
    "FSIZE",
    "DATA",
    "STACK",
    "CORE",
    "RSS",
    "NPROC",
    "NOFILE",
    "MEMLOCK",
    "AS",
    "LOCKS",
    "SIGPENDING",
    "MSGQUEUE",
    "NICE",
    "RTPRIO",
    "RTTIME",
];
