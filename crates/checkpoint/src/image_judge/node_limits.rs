//! Limits and settings for ordinary users at this node.

use std::collections::BTreeSet;
use std::fs::read_to_string;

/// Number of resources with limits (`RLIM_NLIMITS`).
pub const RESOURCE_COUNT: usize = 16;

/// Limits and settings that an ordinary user's process has at this node, or can get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLimits {
    /// Hard limits, by number of resource.
    pub limits: [u64; RESOURCE_COUNT],
    /// Lowest `oom_score_adj`.
    pub oom_score_adjustment: i32,
    /// First port that any process may bind.
    pub first_port: u16,
    /// Largest send and receive buffers in bytes, as the kernel counts them.
    pub buffers_max: (i32, i32),
    /// Largest pipe, bytes.
    pub pipe_max: u32,
    /// Congestion controls that any process may use.
    pub congestion_controls: BTreeSet<String>,
}

impl NodeLimits {
    /// Reads the values that the calling process sees: its own hard limits, and the settings of its network namespace.
    #[must_use]
    pub fn read() -> Self {
        let mut limits = [0; RESOURCE_COUNT];
        for (resource, limit) in (0u32..).zip(&mut limits) {
            let mut found = libc::rlimit64 {
                rlim_cur: 0,
                rlim_max: 0,
            };
            // SAFETY: `found` is writable and outlives the call; nothing is set.
            unsafe { libc::prlimit64(0, resource, std::ptr::null(), &raw mut found) };
            *limit = found.rlim_max;
        }
        let oom_score = read_number("/proc/self/oom_score_adj").unwrap_or(0);
        // The kernel doubles a requested size; sizes that the kernel tunes by itself may be larger.
        let buffer_max = |core: &str, tuned: &str| {
            let requested_max = read_number(core).unwrap_or(0).saturating_mul(2);
            i32::try_from(requested_max.max(read_last_number(tuned).unwrap_or(0)))
                .unwrap_or(i32::MAX)
        };
        let allowed = read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
        let default = read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
        let names = [allowed, default]
            .into_iter()
            .filter_map(Result::ok)
            .collect::<Vec<_>>()
            .join(" ");
        Self {
            limits,
            oom_score_adjustment: i32::try_from(oom_score.max(0)).unwrap_or(1000),
            first_port: read_number("/proc/sys/net/ipv4/ip_unprivileged_port_start")
                .and_then(|port| u16::try_from(port).ok())
                .unwrap_or(1024),
            buffers_max: (
                buffer_max("/proc/sys/net/core/wmem_max", "/proc/sys/net/ipv4/tcp_wmem"),
                buffer_max("/proc/sys/net/core/rmem_max", "/proc/sys/net/ipv4/tcp_rmem"),
            ),
            pipe_max: read_number("/proc/sys/fs/pipe-max-size")
                .and_then(|size| u32::try_from(size).ok())
                .unwrap_or(1 << 20),
            congestion_controls: names.split_whitespace().map(str::to_owned).collect(),
        }
    }

    /// Returns the hard limit of a resource.
    pub(super) fn hard_limit(&self, resource: u32) -> u64 {
        self.limits.get(resource as usize).copied().unwrap_or(0)
    }
}

impl Default for NodeLimits {
    /// Returns the values for an ordinary user at a typical host.
    fn default() -> Self {
        let mut limits = [u64::MAX; RESOURCE_COUNT];
        for (resource, limit) in [
            (libc::RLIMIT_MEMLOCK, 8 << 20),
            (libc::RLIMIT_NOFILE, 1 << 19),
            (libc::RLIMIT_NICE, 0),
            (libc::RLIMIT_RTPRIO, 0),
        ] {
            limits[resource as usize] = limit;
        }
        Self {
            limits,
            oom_score_adjustment: 0,
            first_port: 1024,
            buffers_max: (4 << 20, 6 << 20),
            pipe_max: 1 << 20,
            congestion_controls: ["reno", "cubic"].map(str::to_owned).into(),
        }
    }
}

fn read_number(path: &str) -> Option<i64> {
    read_to_string(path).ok()?.trim().parse().ok()
}

fn read_last_number(path: &str) -> Option<i64> {
    read_to_string(path)
        .ok()?
        .split_whitespace()
        .last()?
        .parse()
        .ok()
}
