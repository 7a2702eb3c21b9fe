//! Checks of a replicated service.

use super::client::{Client, ClientState};
use super::data_plane::{DataPlane, client_index};
use super::flow::Handshake;
use super::host::Host;
use crate::time::Time;
use holdfast_proto::replication::{DropReason, Event};
use holdfast_wire::replication_frames::{LegIndex, LegSet};
use std::collections::{BTreeMap, BTreeSet};

/// Longest time from a wrong byte that can be compared to its report.
const REPORT_MAX: Time = Time::from_micros(50_000);
/// Longest time for which a leg may serve although it lacks input.
const LACKING_MAX: Time = Time::from_micros(200_000);

/// A wrong byte of a leg.
#[derive(Debug)]
struct WrongOutput {
    leg: LegIndex,
    client: usize,
    position: u64,
    /// Time by which it must be reported, once it can be compared.
    due: Option<Time>,
    is_reported: bool,
}

/// The oracles' knowledge of a run.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// Legs that had any fault.
    pub faulty: LegSet,
    wrong: Vec<WrongOutput>,
    /// Legs whose wrong output was reported.
    reported: LegSet,
    /// Clients one of whose server processes was killed: for two legs the end may be the server's wish.
    pub killed_workers: BTreeSet<usize>,
    /// Faults that must make a leg leave the service, with the time by which it must have left.
    pub due: BTreeMap<LegIndex, Time>,
    /// Legs that lack input of a client, and since when.
    lacking: BTreeMap<(usize, LegIndex), Time>,
}

impl Oracle {
    /// Returns true if a leg of the service never had a fault.
    pub fn has_sound_leg(&self, legs: usize) -> bool {
        LegIndex::all()
            .take(legs)
            .any(|leg| !self.faulty.contains(leg))
    }

    pub fn add_wrong_byte(&mut self, leg: LegIndex, client: usize, position: u64) {
        self.wrong.push(WrongOutput {
            leg,
            client,
            position,
            due: None,
            is_reported: false,
        });
    }

    /// Postpones what must happen: for some time there is no contact node.
    pub fn postpone(&mut self, until: Time) {
        self.due
            .values_mut()
            .for_each(|due| *due = (*due).max(until));
        self.wrong.retain(|wrong| wrong.is_reported);
        self.lacking.clear();
    }

    /// Checks an event of the state machine.
    pub fn check_event(&mut self, event: &Event) -> Result<(), String> {
        match event {
            Event::Dropped { leg, reason, .. } => self.check_drop(*leg, *reason),
            Event::Diverged {
                client,
                leg,
                position,
            } => {
                self.reported.insert(*leg);
                let client = client_index(*client);
                for wrong in &mut self.wrong {
                    wrong.is_reported |= wrong.client == client && *position > wrong.position;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn check_drop(&mut self, leg: LegIndex, reason: DropReason) -> Result<(), String> {
        // A wrong primary takes the right replicas for wrong, unless a majority decides.
        let is_victim = reason == DropReason::Diverged && !self.wrong.is_empty();
        if self.faulty.contains(leg) || is_victim {
            self.faulty.insert(leg);
            return Ok(());
        }
        Err(format!("{leg} is dropped without a fault: {reason}"))
    }

    /// Checks a promotion in the data plane.
    pub fn check_promotion(&self, leg: LegIndex, live: LegSet) -> Result<(), String> {
        let sound = live.difference(self.faulty);
        if self.reported.contains(leg) && self.faulty.contains(leg) && !sound.is_empty() {
            return Err(format!("{leg} is promoted although its output differed"));
        }
        Ok(())
    }

    /// Checks an acknowledgement for a client.
    pub fn check_acknowledgement(
        &self,
        client: usize,
        ack: u64,
        live: LegSet,
        hosts: &[Host],
    ) -> Result<(), String> {
        let lacks = |leg: &LegIndex| hosts[leg.position()].acknowledged(client) < ack;
        match live.iter().find(lacks) {
            Some(leg) => Err(format!(
                "client {client} is told that {ack} bytes have arrived, and {leg} has {}",
                hosts[leg.position()].acknowledged(client)
            )),
            None => Ok(()),
        }
    }

    /// Checks what a client reads.
    pub fn check_client(
        &self,
        number: usize,
        client: &mut Client,
        legs: usize,
    ) -> Result<(), String> {
        while let Some(position) = client.next_wrong_byte() {
            let is_known =
                |wrong: &WrongOutput| wrong.client == number && wrong.position == position;
            if !self.wrong.iter().any(is_known) {
                return Err(format!("client {number} reads a wrong byte at {position}"));
            }
        }
        let sound = self.has_sound_leg(legs);
        match client.state {
            ClientState::Reset if sound => Err(format!("client {number} is reset without need")),
            ClientState::Cut if sound && !self.killed_workers.contains(&number) => {
                Err(format!("the output of client {number} ends early"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that a client has ended, unless all legs have failed in a way that no replicator can tell from waiting.
    pub fn check_end(&self, number: usize, client: &Client, hosts: &[Host]) -> Result<(), String> {
        let are_dead = hosts.iter().all(Host::is_dead);
        let must_end = self.has_sound_leg(hosts.len()) || are_dead;
        match client.has_ended() || !must_end {
            true => Ok(()),
            false => Err(format!(
                "client {number} waits for ever ({:?})",
                client.state
            )),
        }
    }

    /// Checks the data plane at regular times.
    pub fn check_tick(
        &mut self,
        now: Time,
        data_plane: &DataPlane,
        hosts: &[Host],
    ) -> Result<(), String> {
        for (leg, due) in &self.due {
            let others = data_plane.live.without(*leg).difference(self.faulty);
            if now >= *due && data_plane.live.contains(*leg) && !others.is_empty() {
                return Err(format!("{leg} still serves"));
            }
        }
        self.check_comparison(now, data_plane)?;
        self.check_input(now, data_plane, hosts)
    }

    fn check_comparison(&mut self, now: Time, data_plane: &DataPlane) -> Result<(), String> {
        for wrong in self.wrong.iter_mut().filter(|wrong| !wrong.is_reported) {
            let (primary, live) = data_plane.roles(wrong.client);
            let Some(flow) = data_plane.flows.get(&wrong.client) else {
                continue;
            };
            let end = |leg: LegIndex| flow.legs[leg.position()].received_end();
            let other = live.without(wrong.leg).iter().map(end).max();
            let is_comparable = live.contains(wrong.leg)
                && flow.base().is_some_and(|base| base <= wrong.position)
                && end(wrong.leg) > wrong.position
                && other.is_some_and(|end| end > wrong.position)
                && end(primary) > wrong.position
                && flow.sent > wrong.position;
            match wrong.due {
                _ if !is_comparable => wrong.due = None,
                None => wrong.due = Some(now + REPORT_MAX),
                Some(due) if now < due => {}
                Some(_) => {
                    return Err(format!(
                        "the wrong byte of {} at {} of client {} is not reported",
                        wrong.leg, wrong.position, wrong.client
                    ));
                }
            }
        }
        Ok(())
    }

    fn check_input(
        &mut self,
        now: Time,
        data_plane: &DataPlane,
        hosts: &[Host],
    ) -> Result<(), String> {
        for (client, flow) in &data_plane.flows {
            for leg in data_plane.live.iter() {
                let told = flow.shown_ack.min(flow.client_data_end());
                // A successor does not know whether the last position is a FIN, so the leg's FIN counts, too.
                let lacks = hosts[leg.position()].acknowledged(*client) < told;
                if !lacks || !matches!(flow.handshake, Handshake::Shown) {
                    self.lacking.remove(&(*client, leg));
                    continue;
                }
                let since = *self.lacking.entry((*client, leg)).or_insert(now);
                if now >= since + LACKING_MAX {
                    return Err(format!(
                        "{leg} serves, and lacks input of client {client} up to {told}"
                    ));
                }
            }
        }
        Ok(())
    }
}
