//! Conversion between the replicator's maps and the events of the machine.

use std::net::SocketAddr;
use std::time::Duration;

use holdfast_bpf::replication::shared_with_c::{
    Connection, ConnectionKey, HAS_TIMESTAMPS, HalfOpen, HandshakeAnswer, LEG_FIN, LEG_RESET,
    LegRoles, REPLICATION_CLOSED, REPLICATION_DIVERGED, REPLICATION_LEG_FINISHED,
    REPLICATION_LEG_RESET, REPLICATION_OPENED, REPLICATION_OUTPUT_AFTER_FIN, REPLICATION_REFUSED,
    ReplicationEvent,
};
use holdfast_bpf::replication::watch::{self, Observation};
use holdfast_proto::replication::{DataPlaneEvent, WatchLimits};
use holdfast_wire::replication_frames::{
    ConnectionRecord, LEGS_MAX, LegIndex, LegSet, LegTranslation, ReplicationRoles,
};

/// Window scale of a peer that announced more than TCP allows (RFC 7323, section 2.3).
const WINDOW_SCALE_MAX: u8 = 14;

/// Returns the legs in a set of the maps.
pub(super) fn leg_set(bits: u32) -> LegSet {
    LegIndex::all()
        .filter(|leg| bits >> leg.position() & 1 == 1)
        .collect()
}

/// Returns the roles in the form of the maps.
pub(super) fn map_roles(primary: LegIndex, live: LegSet) -> LegRoles {
    LegRoles {
        primary: primary.into(),
        live: live.into(),
    }
}

/// Returns the limits in the form of the watch.
pub(super) fn watch_limits(limits: &WatchLimits) -> watch::WatchLimits {
    watch::WatchLimits {
        silence_round_trips: limits.silence_round_trips,
        silence_extra: limits.silence_extra,
        stall_max: limits.stall_max,
        lag_bytes_max: limits.lag_bytes_max,
        lag_time_max: limits.lag_time_max,
    }
}

/// Returns the record of a connection whose handshake all live legs have answered.
pub(super) fn handshake_record(client: SocketAddr, handshake: &HalfOpen) -> ConnectionRecord {
    let roles = LegRoles::of_service(handshake.live);
    let live = leg_set(roles.live.into());
    let primary = &handshake.legs[usize::from(roles.primary)];
    let answers = || live.iter().map(|leg| &handshake.legs[leg.position()]);
    let translation = |answer: &HandshakeAnswer| LegTranslation {
        sequence_offset: primary.isn.wrapping_sub(answer.isn),
        timestamp_offset: primary.timestamp.wrapping_sub(answer.timestamp),
        mss: answer.mss,
        window_scale: answer.scale.min(WINDOW_SCALE_MAX),
    };
    let options = answers().fold(handshake.client_options, |all, leg| all & leg.options);
    let mut legs = [None; LEGS_MAX];
    for leg in live.iter() {
        legs[leg.position()] = Some(translation(&handshake.legs[leg.position()]));
    }
    ConnectionRecord {
        client,
        client_isn: handshake.client_isn,
        service_isn: primary.isn,
        mss: answers().map(|leg| leg.mss).min().unwrap_or(0),
        client_window_scale: handshake.client_scale.min(WINDOW_SCALE_MAX),
        service_window_scale: answers()
            .map(|leg| leg.scale)
            .max()
            .unwrap_or(0)
            .min(WINDOW_SCALE_MAX),
        has_timestamps: options & HAS_TIMESTAMPS != 0,
        live,
        legs,
    }
}

/// Returns the record of an established connection whose service has these roles.
pub(super) fn connection_record(
    client: SocketAddr,
    connection: &Connection,
    service: LegRoles,
) -> ConnectionRecord {
    let live = leg_set(connection.roles_in_force(service).live.into());
    let mut legs = [None; LEGS_MAX];
    for leg in live.iter() {
        let state = &connection.legs[leg.position()];
        legs[leg.position()] = Some(LegTranslation {
            sequence_offset: state.sequence_offset,
            timestamp_offset: state.timestamp_offset,
            mss: state.mss,
            window_scale: state.scale.min(WINDOW_SCALE_MAX),
        });
    }
    ConnectionRecord {
        client,
        client_isn: connection.client_isn,
        service_isn: connection.isn,
        mss: connection.mss,
        client_window_scale: connection.client_scale.min(WINDOW_SCALE_MAX),
        service_window_scale: connection.scale.min(WINDOW_SCALE_MAX),
        has_timestamps: connection.options & HAS_TIMESTAMPS != 0,
        live,
        legs,
    }
}

/// Returns the ends of legs that an earlier daemon may not have read.
pub(super) fn ended_legs(
    client: SocketAddr,
    connection: &Connection,
    live: LegSet,
) -> impl Iterator<Item = DataPlaneEvent> + use<> {
    let start = connection.client_isn.wrapping_add(1);
    let states = connection.legs;
    live.iter().filter_map(move |leg| {
        let state = &states[leg.position()];
        let acknowledged = state.ack.wrapping_sub(start);
        match state.flags {
            flags if flags & LEG_RESET != 0 => Some(DataPlaneEvent::LegReset {
                client,
                leg,
                acknowledged,
            }),
            flags if flags & LEG_FIN != 0 => Some(DataPlaneEvent::LegFinished {
                client,
                leg,
                acknowledged,
            }),
            _ => None,
        }
    })
}

/// Returns the roles of a service whose legs are at these nodes.
pub(super) fn service_roles(
    roles: LegRoles,
    nodes: [Option<holdfast_wire::NodeId>; LEGS_MAX],
) -> Option<ReplicationRoles> {
    let has_node = |leg: &LegIndex| nodes[leg.position()].is_some();
    let live: LegSet = leg_set(roles.live.into()).iter().filter(has_node).collect();
    let primary = LegIndex::new(roles.primary.into()).filter(|leg| live.contains(*leg));
    let primary = primary.or_else(|| live.iter().next())?;
    Some(ReplicationRoles {
        primary,
        live,
        nodes,
    })
}

/// Converts an event of the data plane. `handshake` finds the handshake of a client.
pub(super) fn data_plane_event(
    event: &ReplicationEvent,
    handshake: impl Fn(&ConnectionKey) -> Option<HalfOpen>,
) -> Option<DataPlaneEvent> {
    let client = event.key.client();
    let leg = LegIndex::new(event.leg.into());
    let acknowledged = event.acknowledged;
    match event.kind {
        REPLICATION_OPENED => Some(DataPlaneEvent::Opened {
            record: handshake_record(client, &handshake(&event.key)?),
        }),
        REPLICATION_CLOSED => Some(DataPlaneEvent::Closed { client }),
        REPLICATION_REFUSED => Some(DataPlaneEvent::HandshakeRefused {
            client,
            refused: leg_set(event.legs.into()),
            answered: leg_set(event.answered.into()),
        }),
        REPLICATION_LEG_RESET => Some(DataPlaneEvent::LegReset {
            client,
            leg: leg?,
            acknowledged,
        }),
        REPLICATION_LEG_FINISHED => Some(DataPlaneEvent::LegFinished {
            client,
            leg: leg?,
            acknowledged,
        }),
        REPLICATION_OUTPUT_AFTER_FIN => Some(DataPlaneEvent::OutputAfterFin {
            client,
            finished: leg_set(event.legs.into()),
        }),
        REPLICATION_DIVERGED => {
            let digest =
                |index: usize| (event.known >> index & 1 == 1).then(|| event.digests[index]);
            Some(DataPlaneEvent::Diverged {
                client,
                position: event.position,
                digests: std::array::from_fn(digest),
            })
        }
        _ => None,
    }
}

/// Converts an observation of the watch. None for a sign of life, which concerns nodes.
pub(super) fn observation_event(observation: &Observation) -> Option<(u16, DataPlaneEvent)> {
    let index = |leg: u8| LegIndex::new(leg.into());
    let (key, event) = match *observation {
        Observation::HandshakeUnanswered {
            key,
            silent,
            answered,
            attempts,
        } => {
            let event = DataPlaneEvent::HandshakeUnanswered {
                client: key.client(),
                silent: leg_set(silent.into()),
                answered: leg_set(answered.into()),
                attempts,
            };
            (key, event)
        }
        Observation::LegSilent {
            key,
            leg,
            silence,
            round_trip,
            answered,
        } => {
            let event = DataPlaneEvent::LegSilent {
                client: key.client(),
                leg: index(leg)?,
                silence,
                round_trip,
                answered: leg_set(answered.into()),
            };
            (key, event)
        }
        Observation::LegStalled { key, leg, ahead } => {
            let event = DataPlaneEvent::LegStalled {
                client: key.client(),
                leg: index(leg)?,
                ahead: leg_set(ahead.into()),
            };
            (key, event)
        }
        Observation::LegLagging { key, leg, bytes } => {
            let event = DataPlaneEvent::LegLagging {
                client: key.client(),
                leg: index(leg)?,
                bytes,
            };
            (key, event)
        }
        Observation::Progress {
            key,
            acknowledged,
            behind,
            compared,
        } => {
            let event = DataPlaneEvent::Progress {
                client: key.client(),
                acknowledged,
                behind,
                compared: leg_set(compared.into()),
            };
            (key, event)
        }
        Observation::LegsHeard { .. } => return None,
    };
    Some((key.service, event))
}

/// Returns the time between two looks at all connections when the last look took this long: at most a tenth of a processor.
pub(super) fn observation_interval(took: Duration) -> Duration {
    const INTERVAL_MIN: Duration = Duration::from_millis(10);
    const INTERVAL_MAX: Duration = Duration::from_millis(500);
    took.saturating_mul(10).clamp(INTERVAL_MIN, INTERVAL_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_bpf::replication::shared_with_c::HAS_SCALE;

    fn answer(isn: u32, timestamp: u32, mss: u16, options: u8) -> HandshakeAnswer {
        HandshakeAnswer {
            isn,
            timestamp,
            mss,
            scale: 7,
            options,
            ..HandshakeAnswer::default()
        }
    }

    #[test]
    fn handshake_gives_the_translations_of_its_legs() {
        let both = HAS_TIMESTAMPS | HAS_SCALE;
        let handshake = HalfOpen {
            client_isn: 5,
            client_scale: 20,
            client_options: both,
            live: 0b101 | 2 << 8,
            legs: [
                answer(100, 10, 1460, both),
                HandshakeAnswer::default(),
                answer(40, 30, 1400, HAS_SCALE),
                HandshakeAnswer::default(),
            ],
            ..HalfOpen::default()
        };
        let client = "10.0.0.9:5000".parse().unwrap();
        let record = handshake_record(client, &handshake);
        assert_eq!((record.service_isn, record.mss), (40, 1400));
        assert_eq!(
            (record.client_window_scale, record.has_timestamps),
            (14, false)
        );
        assert_eq!(u8::from(record.live), 0b101);
        let first = record.legs[0].unwrap();
        assert_eq!(first.sequence_offset, 40u32.wrapping_sub(100));
        assert_eq!(first.timestamp_offset, 20);
        assert!(record.legs[1].is_none());
    }

    #[test]
    fn first_live_leg_takes_the_place_of_a_primary_without_a_node() {
        let nodes = [Some(holdfast_wire::NodeId(2)), None, None, None];
        let roles = |primary, live| service_roles(LegRoles { primary, live }, nodes);
        assert!(roles(0, 0).is_none());
        assert!(roles(1, 0b10).is_none());
        for primary in [0, 1] {
            let known = roles(primary, 0b11).unwrap();
            assert_eq!((known.primary.position(), u8::from(known.live)), (0, 0b1));
        }
    }

    #[test]
    fn looks_take_a_tenth_of_a_processor() {
        let ms = Duration::from_millis;
        assert_eq!(observation_interval(Duration::ZERO), ms(10));
        assert_eq!(observation_interval(ms(4)), ms(40));
        assert_eq!(observation_interval(ms(400)), ms(500));
    }
}
