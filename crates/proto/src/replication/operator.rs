//! Commands of the operator, and new legs.

use super::Replication;
use super::event::{CommandError, DropReason};
use super::legs::{Doubt, Leg, LegPhase};
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::replication_frames::LegIndex;
use std::collections::BTreeSet;

impl Replication {
    /// Makes a replica the primary.
    ///
    /// # Errors
    /// The leg does not exist, is the primary, has not caught up, or is in doubt.
    pub fn promote(&mut self, now: Duration, leg: LegIndex) -> Result<(), CommandError> {
        self.check_active()?;
        if !self.legs.serving().contains(leg) {
            return Err(match self.legs.get(leg) {
                Some(_) => CommandError::CatchingUp(leg),
                None => CommandError::NoSuchLeg(leg),
            });
        }
        if self.legs.primary == leg {
            return Err(CommandError::AlreadyPrimary(leg));
        }
        match self.legs.doubt(leg, &self.standing()) {
            Doubt::None => self.promote_leg(now, leg),
            Doubt::CatchingUp => return Err(CommandError::CatchingUp(leg)),
            Doubt::Suspected | Doubt::Uncompared | Doubt::Diverged => {
                return Err(CommandError::InDoubt(leg));
            }
        }
        Ok(())
    }

    /// Ends replication: the primary serves alone from now on.
    ///
    /// # Errors
    /// The own node is not the contact node.
    pub fn stop(&mut self, now: Duration) -> Result<(), CommandError> {
        self.check_active()?;
        self.config.replicas = 0;
        let primary = self.legs.primary;
        for leg in LegIndex::all().filter(|leg| *leg != primary) {
            self.drop_leg(now, leg, DropReason::Stopped);
        }
        self.update_protection();
        Ok(())
    }

    /// Reserves the position of a new leg, whose server is being made at a node from a running one.
    ///
    /// # Errors
    /// All positions are taken, the node has a leg, or no leg serves.
    pub fn add_leg(&mut self, now: Duration, node: NodeId) -> Result<LegIndex, CommandError> {
        self.check_active()?;
        if self.legs.serving().is_empty() {
            return Err(CommandError::NoLegs);
        }
        let leg = self.legs.add(now, node)?;
        let replicas = self.legs.iter().count() - 1;
        self.config.replicas = self.config.replicas.max(replicas);
        self.update_protection();
        Ok(leg)
    }

    /// Lets a new leg serve: its server runs, and its connections have joined. The leg counts once it is level in all of them.
    ///
    /// # Errors
    /// The leg is not a new one.
    pub fn handle_leg_ready(&mut self, now: Duration, leg: LegIndex) -> Result<(), CommandError> {
        self.check_active()?;
        let is_preparing = |state: &Leg| matches!(state.phase, LegPhase::Preparing);
        if !self.legs.get(leg).is_some_and(is_preparing) {
            return Err(CommandError::NoSuchLeg(leg));
        }
        let mut not_level = BTreeSet::new();
        for (client, connection) in &mut self.connections {
            if connection.record.live.contains(leg) {
                not_level.insert(*client);
            } else {
                // The leg lacks the connection, and is of no use once its client sends more.
                connection.left.insert(leg);
                connection.set_left_at(leg, connection.acknowledged);
            }
        }
        if let Some(state) = self.legs.get_mut(leg) {
            let deadline = now + self.config.catch_up_max;
            state.phase = LegPhase::CatchingUp {
                deadline,
                not_level,
            };
            state.last_heard = now;
        }
        self.publish_roles(now);
        self.finish_if_level(leg);
        Ok(())
    }

    /// Gives up a new leg whose server could not be made.
    pub fn handle_leg_failed(&mut self, now: Duration, leg: LegIndex) {
        let phase = self.legs.get(leg).map(|leg| &leg.phase);
        if matches!(phase, Some(LegPhase::Preparing)) {
            self.drop_leg(now, leg, DropReason::NeverCaughtUp);
        }
    }

    fn check_active(&self) -> Result<(), CommandError> {
        match self.is_active {
            true => Ok(()),
            false => Err(CommandError::NotContactNode),
        }
    }
}
