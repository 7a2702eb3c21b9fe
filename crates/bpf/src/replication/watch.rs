//! Watch over the legs of all connections at regular times: silent, stopped and slow legs, progress, unanswered handshakes. The rules
//! are those of `holdfast_proto::replication`, whose events [`Observation`] mirrors; the machine there decides.

use std::collections::HashMap;
use std::time::Duration;

use super::shared_with_c::{
    CONNECTION_CLIENT_FIN, CONNECTION_CLOSED, CONNECTION_FIN_PASSED, Connection, ConnectionKey,
    HANDSHAKE_PENDING, HalfOpen, LEG_DIVERGED, LEGS, LegRoles, LegState,
};

/// Limits of the watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchLimits {
    /// A busy leg is silent after this number of round trips, plus `silence_extra`.
    pub silence_round_trips: u32,
    /// See `silence_round_trips`.
    pub silence_extra: Duration,
    /// Time after which a leg that acknowledges input, but lacks output that others have, is stopped.
    pub stall_max: Duration,
    /// The primary may be ahead of the slowest leg by this number of bytes.
    pub lag_bytes_max: u32,
    /// Time for which a slow leg may hold up the client.
    pub lag_time_max: Duration,
}

/// An observation about one connection. Sets of legs have bit `i` for leg `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observation {
    /// Some legs have not answered a handshake for the silence limit, and others have.
    HandshakeUnanswered {
        /// The connection whose handshake is not answered by all legs.
        key: ConnectionKey,
        /// Legs that have neither answered nor refused.
        silent: u8,
        /// Legs that have answered.
        answered: u8,
        /// Number of SYN segments that the client has sent.
        attempts: u32,
    },
    /// A leg owes an answer to input, and nothing has come from it for half of the silence limit.
    LegSilent {
        /// The connection in which the leg is silent.
        key: ConnectionKey,
        /// Index of the leg.
        leg: u8,
        /// Duration of the silence.
        silence: Duration,
        /// Longest smoothed round trip of the connection's legs.
        round_trip: Duration,
        /// Legs that have acknowledged more input.
        answered: u8,
    },
    /// A leg has acknowledged input, and has for the stall limit lacked output that other legs have.
    LegStalled {
        /// The connection in which the leg has stalled.
        key: ConnectionKey,
        /// Index of the leg.
        leg: u8,
        /// Legs that have more output.
        ahead: u8,
    },
    /// A leg has held up the client for the lag time.
    LegLagging {
        /// The connection in which the leg lags behind.
        key: ConnectionKey,
        /// Index of the leg.
        leg: u8,
        /// Distance to the primary in bytes.
        bytes: u32,
    },
    /// Sample of a connection's progress.
    Progress {
        /// The connection whose progress was sampled.
        key: ConnectionKey,
        /// Number of input bytes that the client was told are acknowledged, modulo 2^32.
        acknowledged: u32,
        /// For each leg the number of bytes that it lacks: of the input, and of the output that the client was sent.
        behind: [u32; LEGS],
        /// Legs whose output has been compared without a gap, and does not differ.
        compared: u8,
    },
    /// Packets of legs have arrived since the last look.
    LegsHeard {
        /// The connection that the packets belong to.
        key: ConnectionKey,
        /// Legs that sent them.
        legs: u8,
    },
}

/// State of a connection at earlier looks, by which the next one judges.
#[derive(Clone, Copy, Debug, Default)]
struct EarlierLooks {
    /// For each leg the time since which it has lacked output, and the end of its output then.
    lacks_output: [Option<(Duration, u32)>; LEGS],
    /// For each leg the time since which it has held up the client.
    holds_up: [Option<Duration>; LEGS],
    /// For each leg its acknowledgement, end of output and timestamp at the last look.
    numbers: Option<[[u32; 3]; LEGS]>,
}

/// The watch over all connections.
#[derive(Debug)]
pub struct ConnectionWatch {
    limits: WatchLimits,
    looks: HashMap<ConnectionKey, EarlierLooks>,
    handshakes: HashMap<ConnectionKey, Duration>,
}

impl ConnectionWatch {
    /// Returns a watch over no connections yet, with these limits.
    #[must_use]
    pub fn new(limits: WatchLimits) -> Self {
        Self {
            limits,
            looks: HashMap::new(),
            handshakes: HashMap::new(),
        }
    }

    /// Changes the limits of silence, stall and lag.
    pub fn set_limits(&mut self, limits: WatchLimits) {
        self.limits = limits;
    }

    /// Looks at all connections. `now` is a time of `CLOCK_MONOTONIC`, which the programs use, and `roles_of` returns the roles of a
    /// service.
    pub fn observe(
        &mut self,
        now: Duration,
        connections: &[(ConnectionKey, Connection)],
        roles_of: impl Fn(u16) -> LegRoles,
    ) -> Vec<Observation> {
        let mut observations = Vec::new();
        let mut looks = HashMap::with_capacity(connections.len());
        for (key, connection) in connections {
            let roles = connection.roles_in_force(roles_of(key.service));
            if roles.live == 0 || connection.flags & CONNECTION_CLOSED != 0 {
                continue;
            }
            let earlier = self.looks.get(key).copied().unwrap_or_default();
            let mut look = Look {
                now,
                key: *key,
                connection,
                roles,
                limits: &self.limits,
                earlier,
                observations: &mut observations,
            };
            look.watch_legs();
            looks.insert(*key, look.earlier);
        }
        self.looks = looks;
        observations
    }

    /// Looks at all handshakes; the times are those of [`ConnectionWatch::observe`]. Each handshake is reported once in a silence limit.
    pub fn observe_handshakes(
        &mut self,
        now: Duration,
        handshakes: &[(ConnectionKey, HalfOpen)],
        roles_of: impl Fn(u16) -> LegRoles,
    ) -> Vec<Observation> {
        let mut observations = Vec::new();
        let mut reported = HashMap::new();
        for (key, handshake) in handshakes {
            let (answered, refused) = (handshake.answered as u8, handshake.refused as u8);
            let silent = roles_of(key.service).live & !answered & !refused;
            if handshake.state != HANDSHAKE_PENDING || silent == 0 || answered == 0 {
                continue;
            }
            let sent = Duration::from_nanos(handshake.since_ns);
            let since = self.handshakes.get(key).map_or(sent, |at| sent.max(*at));
            let is_late = now >= since + self.limits.silence_extra;
            if is_late {
                observations.push(Observation::HandshakeUnanswered {
                    key: *key,
                    silent,
                    answered,
                    attempts: handshake.attempts,
                });
            }
            reported.insert(*key, if is_late { now } else { since });
        }
        self.handshakes = reported;
        observations
    }
}

impl Connection {
    /// Returns the roles that are in force here when those of the service are `service`. A primary that does not serve is replaced by
    /// the first leg that does, as in the programs.
    #[must_use]
    pub fn roles_in_force(&self, service: LegRoles) -> LegRoles {
        let own = LegRoles::from_raw(self.own_roles);
        let roles = own.unwrap_or(service);
        let live = roles.live & self.present as u8 & 0xf;
        let primary = match live >> roles.primary & 1 {
            1 => roles.primary,
            _ => (live.trailing_zeros() as u8).min(LEGS as u8 - 1),
        };
        LegRoles { primary, live }
    }
}

/// Returns true if sequence number `a` is before `b`.
fn is_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b)).cast_signed() < 0
}

/// Returns how far `from` is before `to`, or 0.
fn distance(from: u32, to: u32) -> u32 {
    to.wrapping_sub(from).cast_signed().max(0).cast_unsigned()
}

/// A look at one connection.
struct Look<'a> {
    now: Duration,
    key: ConnectionKey,
    connection: &'a Connection,
    roles: LegRoles,
    limits: &'a WatchLimits,
    earlier: EarlierLooks,
    observations: &'a mut Vec<Observation>,
}

impl Look<'_> {
    fn watch_legs(&mut self) {
        self.watch_signs_of_life();
        for leg in self.legs(|_| true) {
            self.watch_silence(leg);
            self.watch_output(leg);
            self.watch_lag(leg);
        }
        let connection = self.connection;
        let best = self.best_ack();
        let behind = |leg: &LegState| {
            distance(leg.ack, best).saturating_add(distance(leg.nxt, connection.sent))
        };
        let acknowledged = match connection.flags & CONNECTION_CLIENT_FIN {
            0 => connection.shown_ack,
            _ if is_before(connection.client_fin_seq, connection.shown_ack) => {
                connection.client_fin_seq
            }
            _ => connection.shown_ack,
        };
        self.observations.push(Observation::Progress {
            key: self.key,
            acknowledged: acknowledged.wrapping_sub(connection.client_isn.wrapping_add(1)),
            behind: connection.legs.each_ref().map(behind),
            compared: self.compared_legs(),
        });
    }

    /// Returns the indices of the live legs for which `is_wanted`.
    fn legs(&self, is_wanted: impl Fn(&LegState) -> bool) -> Vec<u8> {
        let is_live = |leg: &u8| self.roles.live >> leg & 1 == 1;
        let legs = (0..LEGS as u8).filter(is_live);
        legs.filter(|leg| is_wanted(self.leg(*leg))).collect()
    }

    fn set(&self, is_wanted: impl Fn(&LegState) -> bool) -> u8 {
        let legs = self.legs(is_wanted);
        legs.iter().fold(0, |set, leg| set | 1 << leg)
    }

    fn leg(&self, leg: u8) -> &LegState {
        &self.connection.legs[usize::from(leg)]
    }

    /// Returns the primary, and the replicas whose output is compared up to the last few bytes, for which the window field is too
    /// coarse.
    fn compared_legs(&self) -> u8 {
        let primary = 1 << self.roles.primary & self.roles.live;
        let is_compared = |leg: &LegState| {
            let uncompared = distance(leg.compared, leg.nxt);
            leg.flags & LEG_DIVERGED == 0 && uncompared < 1 << (leg.client_scale & 15)
        };
        primary | self.set(is_compared)
    }

    /// Returns the replicas with output that the client lacks and has room for: the first bytes of what they hold back.
    fn early_replicas(&self) -> u8 {
        let (sent, edge) = (self.connection.sent, self.connection.client_edge);
        self.set(|leg| is_before(sent, leg.nxt) && is_before(sent, edge))
    }

    /// Returns the furthest acknowledgement of a live leg.
    fn best_ack(&self) -> u32 {
        let start = self.leg(self.roles.primary).ack;
        let acks = self.legs(|_| true).into_iter().map(|leg| self.leg(leg).ack);
        acks.fold(start, |best, ack| best.wrapping_add(distance(best, ack)))
    }

    fn watch_signs_of_life(&mut self) {
        let numbers = |leg: &LegState| [leg.ack, leg.nxt, leg.timestamp];
        let now = self.connection.legs.each_ref().map(numbers);
        let Some(before) = self.earlier.numbers.replace(now) else {
            return;
        };
        let is_heard = |leg: &u8| now[usize::from(*leg)] != before[usize::from(*leg)];
        let legs = self.legs(|_| true).into_iter().filter(is_heard);
        let legs = legs.fold(0, |set, leg| set | 1 << leg);
        if legs != 0 {
            self.observations.push(Observation::LegsHeard {
                key: self.key,
                legs,
            });
        }
    }

    fn watch_silence(&mut self, leg: u8) {
        let state = self.leg(leg);
        let (since, ack) = (Duration::from_nanos(state.owes_since_ns), state.ack);
        if since.is_zero() {
            return;
        }
        let round_trips = self.connection.legs.iter().map(|leg| leg.round_trip_us);
        let longest = u64::from(round_trips.max().unwrap_or(0));
        let round_trip = Duration::from_micros(longest);
        let silence = self.now.saturating_sub(since);
        let limit =
            round_trip.saturating_mul(self.limits.silence_round_trips) + self.limits.silence_extra;
        if silence >= limit / 2 {
            let answered = self.set(|other| is_before(ack, other.ack));
            self.observations.push(Observation::LegSilent {
                key: self.key,
                leg,
                silence,
                round_trip,
                answered,
            });
        }
    }

    fn watch_output(&mut self, leg: u8) {
        let (connection, state) = (self.connection, self.leg(leg));
        let (end, unit) = (state.nxt, 1u32 << (state.client_scale & 15));
        let is_primary = leg == self.roles.primary;
        let ahead = match is_primary {
            true => self.early_replicas() & !(1 << leg),
            false => self.set(|other| is_before(end, other.nxt)),
        };
        let lacks = match is_primary {
            true => ahead != 0,
            // The window field is too coarse for the last bytes.
            false => {
                distance(end, connection.sent) >= unit
                    && connection.flags & CONNECTION_FIN_PASSED == 0
            }
        };
        // A leg that lacks input is silent, not stopped.
        let is_late = lacks && !is_before(state.ack, self.best_ack());
        let since = &mut self.earlier.lacks_output[usize::from(leg)];
        if !is_late {
            *since = None;
            return;
        }
        // A leg with new output is slow, not stopped.
        if since.is_none_or(|(_, former)| former != end) {
            *since = Some((self.now, end));
        }
        let since = since.map_or(self.now, |(since, _)| since);
        if self.now.saturating_sub(since) >= self.limits.stall_max {
            self.observations.push(Observation::LegStalled {
                key: self.key,
                leg,
                ahead,
            });
        }
    }

    fn watch_lag(&mut self, leg: u8) {
        let (connection, state) = (self.connection, self.leg(leg));
        let (mss, bound) = (u32::from(connection.mss), self.limits.lag_bytes_max);
        let bytes = distance(state.nxt, self.leg(self.roles.primary).nxt);
        let holds_output = leg != self.roles.primary
            && bytes.saturating_add(mss) > bound
            && distance(state.nxt, connection.client_edge) > bound;
        let is_client_blocked = distance(connection.client_nxt, connection.shown_edge) < mss;
        // Several slow legs may hold up the client together.
        let is_at_limit = is_before(state.edge, connection.shown_edge.wrapping_add(mss));
        let (edge, index) = (state.edge, usize::from(leg));
        let others = self.set(|other| distance(edge, other.edge) >= mss.max(1));
        let holds_input = is_client_blocked && is_at_limit && others != 0;
        let since = &mut self.earlier.holds_up[index];
        if !holds_output && !holds_input {
            *since = None;
            return;
        }
        let since = *since.get_or_insert(self.now);
        if self.now.saturating_sub(since) >= self.limits.lag_time_max {
            self.observations.push(Observation::LegLagging {
                key: self.key,
                leg,
                bytes,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: WatchLimits = WatchLimits {
        silence_round_trips: 3,
        silence_extra: Duration::from_millis(60),
        stall_max: Duration::from_millis(300),
        lag_bytes_max: 1 << 20,
        lag_time_max: Duration::from_millis(80),
    };
    const ROLES: LegRoles = LegRoles {
        primary: 0,
        live: 0b11,
    };

    /// Returns a connection of two level legs, near the end of the sequence space.
    fn level() -> Connection {
        let base = 0xffff_ff00;
        let leg = LegState {
            nxt: base,
            compared: base,
            ack: 5000,
            edge: 200_000,
            client_scale: 4,
            round_trip_us: 2000,
            ..LegState::default()
        };
        Connection {
            client_isn: 4000,
            client_nxt: 5000,
            shown_ack: 5000,
            shown_edge: 200_000,
            sent: base,
            client_edge: base.wrapping_add(1 << 22),
            present: 0b11,
            mss: 1460,
            legs: [leg; LEGS],
            ..Connection::default()
        }
    }

    fn observe_at(
        watch: &mut ConnectionWatch,
        ms: u64,
        connection: &Connection,
    ) -> Vec<Observation> {
        let key = ConnectionKey::default();
        let now = Duration::from_millis(ms);
        let mut found = watch.observe(now, &[(key, *connection)], |_| ROLES);
        found.retain(|observation| {
            !matches!(
                observation,
                Observation::Progress { .. } | Observation::LegsHeard { .. }
            )
        });
        found
    }

    #[test]
    fn level_legs_only_make_progress() {
        let mut watch = ConnectionWatch::new(LIMITS);
        let key = ConnectionKey::default();
        let now = Duration::from_secs(9);
        let found = watch.observe(now, &[(key, level())], |_| ROLES);
        let progress = Observation::Progress {
            key,
            acknowledged: 999,
            behind: [0; LEGS],
            compared: 0b11,
        };
        assert_eq!(found, [progress]);
    }

    #[test]
    fn leg_is_heard_when_its_numbers_change() {
        let mut watch = ConnectionWatch::new(LIMITS);
        let (key, mut connection) = (ConnectionKey::default(), level());
        let mut heard = |ms, connection: &Connection| {
            let now = Duration::from_millis(ms);
            let mut found = watch.observe(now, &[(key, *connection)], |_| ROLES);
            found.retain(|observation| matches!(observation, Observation::LegsHeard { .. }));
            found
        };
        assert_eq!(heard(1000, &connection), []);
        assert_eq!(heard(1010, &connection), []);
        connection.legs[1].timestamp = 7;
        let expected = Observation::LegsHeard { key, legs: 0b10 };
        assert_eq!(heard(1020, &connection), [expected]);
        assert_eq!(heard(1030, &connection), []);
    }

    #[test]
    fn silent_leg_is_reported_from_half_of_the_limit_on() {
        let mut watch = ConnectionWatch::new(LIMITS);
        let mut connection = level();
        connection.legs[1].ack = 4500;
        connection.legs[1].owes_since_ns = 1_000_000_000;
        assert_eq!(observe_at(&mut watch, 1032, &connection), []);
        for ms in [1033, 1100] {
            let silent = Observation::LegSilent {
                key: ConnectionKey::default(),
                leg: 1,
                silence: Duration::from_millis(ms - 1000),
                round_trip: Duration::from_millis(2),
                answered: 0b1,
            };
            assert_eq!(observe_at(&mut watch, ms, &connection), [silent]);
        }
    }

    #[test]
    fn replica_without_output_is_stalled_except_for_bytes_below_the_window_unit() {
        let mut watch = ConnectionWatch::new(LIMITS);
        let mut connection = level();
        connection.legs[0].nxt = connection.legs[0].nxt.wrapping_add(1000);
        connection.sent = connection.legs[0].nxt;
        connection.legs[1].nxt = connection.sent.wrapping_sub(15);
        assert_eq!(observe_at(&mut watch, 1000, &connection), []);
        assert_eq!(observe_at(&mut watch, 2000, &connection), []);
        connection.legs[1].nxt = connection.sent.wrapping_sub(16);
        assert_eq!(observe_at(&mut watch, 3000, &connection), []);
        assert_eq!(observe_at(&mut watch, 3299, &connection), []);
        let stalled = Observation::LegStalled {
            key: ConnectionKey::default(),
            leg: 1,
            ahead: 0b1,
        };
        assert_eq!(observe_at(&mut watch, 3300, &connection), [stalled]);
    }

    #[test]
    fn probe_alone_says_nothing_about_the_primary() {
        let mut watch = ConnectionWatch::new(LIMITS);
        let mut connection = level();
        // A keepalive of an idle server looks like a probe for a window.
        connection.probing = 0b10;
        for ms in [300_000, 300_300, 310_000] {
            assert_eq!(observe_at(&mut watch, ms, &connection), []);
        }
    }

    #[test]
    fn primary_is_stalled_since_a_replica_has_output_below_the_window_unit() {
        let mut watch = ConnectionWatch::new(LIMITS);
        let mut connection = level();
        connection.client_edge = connection.sent.wrapping_add(1000);
        connection.legs[1].nxt = connection.sent.wrapping_add(6);
        let stalled = Observation::LegStalled {
            key: ConnectionKey::default(),
            leg: 0,
            ahead: 0b10,
        };
        assert_eq!(observe_at(&mut watch, 1000, &connection), []);
        assert_eq!(observe_at(&mut watch, 1300, &connection), [stalled]);
        // A primary with new output is slow, not stopped.
        for leg in &mut connection.legs {
            leg.nxt = leg.nxt.wrapping_add(6);
        }
        connection.sent = connection.legs[0].nxt;
        assert_eq!(observe_at(&mut watch, 1310, &connection), []);
        assert_eq!(observe_at(&mut watch, 1609, &connection), []);
        assert_eq!(observe_at(&mut watch, 1610, &connection), [stalled]);
        // A client without room is waited for.
        connection.client_edge = connection.sent;
        assert_eq!(observe_at(&mut watch, 1620, &connection), []);
    }

    #[test]
    fn leg_with_full_window_holds_up_the_client() {
        let mut watch = ConnectionWatch::new(LIMITS);
        let mut connection = level();
        connection.legs[1].edge = 5000;
        connection.shown_edge = 5000;
        assert_eq!(observe_at(&mut watch, 1000, &connection), []);
        let lagging = Observation::LegLagging {
            key: ConnectionKey::default(),
            leg: 1,
            bytes: 0,
        };
        assert_eq!(observe_at(&mut watch, 1080, &connection), [lagging]);
        connection.legs[1].edge = 200_000;
        assert_eq!(observe_at(&mut watch, 1090, &connection), []);
    }

    #[test]
    fn replica_at_the_lag_bound_is_lagging() {
        let mut watch = ConnectionWatch::new(LIMITS);
        let mut connection = level();
        connection.legs[0].nxt = connection.legs[1].nxt.wrapping_add(1 << 20);
        connection.sent = connection.legs[0].nxt;
        observe_at(&mut watch, 1000, &connection);
        let lagging = Observation::LegLagging {
            key: ConnectionKey::default(),
            leg: 1,
            bytes: 1 << 20,
        };
        assert_eq!(observe_at(&mut watch, 1080, &connection), [lagging]);
    }

    #[test]
    fn handshake_is_reported_once_in_a_silence_limit() {
        let mut watch = ConnectionWatch::new(LIMITS);
        let handshake = HalfOpen {
            answered: 0b1,
            attempts: 2,
            since_ns: 1_000_000_000,
            ..HalfOpen::default()
        };
        let key = ConnectionKey::default();
        let mut at = |ms| {
            let now = Duration::from_millis(ms);
            watch
                .observe_handshakes(now, &[(key, handshake)], |_| ROLES)
                .len()
        };
        assert_eq!([1059, 1060, 1061, 1119, 1120].map(&mut at), [0, 1, 0, 0, 1]);
    }

    #[test]
    fn primary_that_does_not_serve_is_replaced() {
        let mut connection = level();
        connection.own_roles = 1 << 31 | 0b10;
        let roles = connection.roles_in_force(ROLES);
        assert_eq!((roles.primary, roles.live), (1, 0b10));
    }
}
