//! Judgement of the state of processes and threads.

use super::node_limits::RESOURCE_COUNT;
use super::{ImageJudge, Verdict, refuse_for_users, require};
use crate::image::{
    Credentials, IntervalTimer, PosixTimer, PrctlMmMap, ProcessState, ProcessTreeState,
    ResourceLimit, Rseq, Scheduling, SignalInfo, ThreadState,
};

/// `SECBIT_KEEP_CAPS`, which any process may set, and which means nothing without capabilities.
const SECBIT_KEEP_CAPS: u32 = 1 << 4;
/// Clocks that wake the machine, which requires `CAP_WAKE_ALARM`.
pub(super) const ALARM_CLOCKS: [i32; 2] = [libc::CLOCK_REALTIME_ALARM, libc::CLOCK_BOOTTIME_ALARM];
/// `SCHED_EXT`.
const SCHED_EXT: i32 = 7;
/// `IOPRIO_CLASS_RT`, and the lowest bit of the class in an I/O priority.
const IOPRIO_CLASS_RT: u32 = 1;
const IOPRIO_CLASS_SHIFT: u32 = 13;
/// Nice value that corresponds to 0 in `RLIMIT_NICE`.
const RLIMIT_NICE_ORIGIN: i64 = 20;

impl ImageJudge {
    /// Checks the state of processes.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check_state(&self, frozen: &ProcessTreeState) -> Verdict {
        let ProcessTreeState { processes } = frozen;
        processes
            .iter()
            .flatten()
            .try_for_each(|process| self.check_process_state(process))
    }

    fn check_process_state(&self, process: &ProcessState) -> Verdict {
        let ProcessState {
            threads,
            // A process may set its own state to anything: handlers, signals to itself, memory, and settings
            // of these that the process itself passes to the kernel, with its own rights.
            signal_actions: _,
            pending,
            interval_timers,
            posix_timers,
            memory:
                PrctlMmMap {
                    addresses: _,
                    auxiliary: _,
                },
            limits,
            umask: _,
            // The directory is entered with the rights of the process, or is below a directory of the policy.
            directory: _,
            group_stop: _,
            is_stop_unreported: _,
            dumpable: _,
            child_subreaper: _,
            thp_disable: _,
            mdwe: _,
            is_merging: _,
            // Locked memory is within `RLIMIT_MEMLOCK`, which the kernel checks when the process locks its memory.
            mlockall_flags: _,
            membarrier_registrations: _,
            oom_score_adjustment,
            dump_filter: _,
        } = process;
        threads
            .iter()
            .try_for_each(|thread| self.check_thread(thread))?;
        if self.policy.has_root() {
            return Ok(());
        }
        for SignalInfo(_) in pending {}
        for IntervalTimer {
            interval_us: _,
            remaining_us: _,
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
                remaining_ns: _,
            } = timer;
            require(!ALARM_CLOCKS.contains(clock), || {
                format!("its timer {id} wakes the machine (clock {clock})")
            })?;
        }
        self.check_resource_limits(limits)?;
        let lowest = self.node_limits.oom_score_adjustment;
        require(*oom_score_adjustment >= lowest, || {
            format!(
                "its oom_score_adj is {oom_score_adjustment}, below this node's minimum {lowest}"
            )
        })
    }

    fn check_resource_limits(&self, check_limits: &[ResourceLimit]) -> Verdict {
        require(check_limits.len() == RESOURCE_COUNT, || {
            format!(
                "it has {} limits instead of {RESOURCE_COUNT}",
                check_limits.len()
            )
        })?;
        for (resource, (limit, highest)) in check_limits
            .iter()
            .zip(&self.node_limits.limits)
            .enumerate()
        {
            let ResourceLimit { soft, hard } = limit;
            require(soft <= hard && hard <= highest, || {
                let name = RESOURCE_NAMES.get(resource).unwrap_or(&"a resource");
                format!(
                    "its limit RLIMIT_{name} is {soft} (hard {hard}), above this node's hard limit {highest}"
                )
            })?;
        }
        Ok(())
    }

    fn check_thread(&self, thread: &ThreadState) -> Verdict {
        let ThreadState {
            // Registers are computation state; the kernel lets no register give rights.
            registers: _,
            extended_registers: _,
            signal_mask: _,
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
            tsc_mode: _,
            mce_policy: _,
            no_new_privileges,
            seccomp_filters: filters,
        } = thread;
        self.check_credentials(credentials)?;
        if self.policy.has_root() {
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
        self.check_scheduling(scheduling)?;
        require(io_priority >> IOPRIO_CLASS_SHIFT != IOPRIO_CLASS_RT, || {
            "a thread has the real-time class of I/O priority".to_owned()
        })
    }

    pub(super) fn check_credentials(&self, credentials: &Credentials) -> Verdict {
        let Credentials {
            uids,
            gids,
            groups,
            capabilities: [inheritable, permitted, effective, bounding, ambient],
            secure_bits,
        } = credentials;
        uids.iter().try_for_each(|user| self.check_user(*user))?;
        self.check_groups(gids.iter().chain(groups))?;
        if self.policy.has_root() {
            return Ok(());
        }
        if (permitted | effective | ambient) != 0 {
            return refuse_for_users("it has capabilities");
        }
        // With inheritable capabilities, a program gains capabilities that its file has.
        if *inheritable != 0 {
            return refuse_for_users("it has inheritable capabilities");
        }
        // The bounding set never exceeds the daemon's own: bits are removed from that set, and none is added.
        let _ = bounding;
        // A program with another user's rights relies on the kernel's ordinary rules.
        require(secure_bits & !SECBIT_KEEP_CAPS == 0, || {
            format!("it has securebits {secure_bits:#x}")
        })
    }

    fn check_scheduling(&self, scheduling: &Scheduling) -> Verdict {
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
                let most = self.node_limits.hard_limit(libc::RLIMIT_RTPRIO);
                require(u64::from(*priority) <= most, || {
                    format!(
                        "a thread has real-time priority {priority}, above this node's limit {most} (RLIMIT_RTPRIO)"
                    )
                })?;
            }
            _ => return refuse_for_users(format!("a thread has scheduling policy {policy}")),
        }
        let most =
            i64::try_from(self.node_limits.hard_limit(libc::RLIMIT_NICE)).unwrap_or(i64::MAX);
        let least = RLIMIT_NICE_ORIGIN.saturating_sub(most).min(0);
        require(i64::from(*nice) >= least, || {
            format!(
                "a thread has nice value {nice}, below this node's minimum {least} (RLIMIT_NICE)"
            )
        })
    }
}

/// Names of resources, by number.
const RESOURCE_NAMES: [&str; RESOURCE_COUNT] = [
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
