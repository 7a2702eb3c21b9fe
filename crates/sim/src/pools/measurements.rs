//! Measurements (paper 004 section 4).

use crate::time::Time;

/// Result of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolRunOutcome {
    /// One per interval of [`PoolRunConfig::windows`](super::PoolRunConfig::windows), in order; one for the whole
    /// run if there are none.
    pub windows: Vec<MeasurementWindow>,
    /// Number of delivered messages and fired timers.
    pub events: u64,
    /// Simulated time, in virtual seconds.
    pub simulated_s: f64,
    /// A digest of all events: equal exactly for equal runs.
    pub digest: u64,
}

/// Sums over the requests that ended within a window.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MeasurementWindow {
    /// Number of requests.
    pub requests: u64,
    /// Total size, in calculations.
    pub size: f64,
    /// Seconds from the generation of the request until the user has the result: "the sum of queuing delay, startup
    /// delay [...] and processing time".
    pub handling_s: f64,
    /// Seconds spent waiting for the user's earlier requests.
    pub queuing_s: f64,
    /// Startup delay in seconds: "dequeuing until reception of acceptance acknowledgement".
    pub startup_s: f64,
    /// Sum of the handling speeds, in calculations per second (equation 1).
    pub speeds: f64,
    /// Number of requests that one element lost and another served.
    pub retried: u64,
    /// Number of requests served by an element in the user's own zone.
    pub local: u64,
    /// Calculations of all elements within the window.
    pub calculated: f64,
    /// Capacity of all elements within the window, in calculations.
    pub capacity: f64,
}

/// A request that has ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct FinishedRequest {
    pub(super) size: f64,
    pub(super) generated: Time,
    pub(super) dequeued: Time,
    pub(super) accepted: Time,
    pub(super) ended: Time,
    pub(super) attempts: u32,
    pub(super) local: bool,
}

impl MeasurementWindow {
    pub(super) fn add(&mut self, request: &FinishedRequest) {
        let handling = request.ended.since(request.generated).as_secs_f64();
        self.requests += 1;
        self.size += request.size;
        self.handling_s += handling;
        self.queuing_s += request.dequeued.since(request.generated).as_secs_f64();
        self.startup_s += request.accepted.since(request.dequeued).as_secs_f64();
        self.speeds += request.size / handling;
        self.retried += u64::from(request.attempts > 1);
        self.local += u64::from(request.local);
    }

    /// Returns the mean handling time of a request, in seconds.
    #[must_use]
    pub fn handling_mean_s(&self) -> f64 {
        self.handling_s / self.requests as f64
    }

    /// Returns the handling speed: total size divided by total handling time, in calculations per second.
    #[must_use]
    pub fn speed(&self) -> f64 {
        self.size / self.handling_s
    }

    /// Returns the mean of the requests' handling speeds, in which short and long requests count equally.
    #[must_use]
    pub fn speed_of_requests(&self) -> f64 {
        self.speeds / self.requests as f64
    }

    /// Returns the used share of the elements' capacity.
    #[must_use]
    pub fn utilisation(&self) -> f64 {
        self.calculated / self.capacity
    }

    /// Returns the share of requests served in their user's zone.
    #[must_use]
    pub fn local_share(&self) -> f64 {
        self.local as f64 / self.requests as f64
    }
}
