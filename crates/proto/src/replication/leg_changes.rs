//! Legs that leave connections or the service, and promotion.

use super::Replication;
use super::event::{DropReason, Event, Output};
use super::legs::LegPhase;
use core::time::Duration;
use holdfast_wire::replication_frames::{ConnectionChange, LegIndex, LegSet};
use std::net::SocketAddr;

impl Replication {
    /// Drops a leg from the service. The last leg stays, unless its node is lost.
    pub(super) fn drop_leg(&mut self, now: Duration, leg: LegIndex, reason: DropReason) {
        let Some(node) = self.legs.get(leg).map(|leg| leg.node) else {
            return;
        };
        let serving = self.legs.serving();
        let is_node_lost = matches!(reason, DropReason::Silent | DropReason::NodeRemoved);
        if serving == LegSet::of(leg) && !is_node_lost {
            return;
        }
        self.legs.remove(leg);
        self.report(Event::Dropped { leg, node, reason });
        if serving.contains(leg) {
            match serving.without(leg).is_empty() {
                true => self.on_last_leg_lost(now),
                false => self.continue_without(now, leg),
            }
        }
        self.update_protection();
    }

    /// Resets all clients: no leg is left.
    fn on_last_leg_lost(&mut self, now: Duration) {
        let roles = self.legs.roles();
        self.outputs.push_back(Output::SetRoles(roles));
        for client in self.clients() {
            self.reset_client(now, client);
        }
        self.with_backup(|sender, io| sender.on_roles(now, io.roles, io));
    }

    /// Goes on with the other legs when one no longer serves.
    fn continue_without(&mut self, now: Duration, leg: LegIndex) {
        if self.legs.primary == leg {
            let standing = self.standing();
            let chosen = self.legs.choose(self.legs.serving(), &standing);
            self.legs.primary = chosen.unwrap_or(leg);
            let in_doubt = self
                .legs
                .doubt(self.legs.primary, &standing)
                .is_about_output();
            self.report(Event::Promoted {
                leg: self.legs.primary,
                former: leg,
                in_doubt,
            });
        }
        let roles = self.legs.roles();
        self.outputs.push_back(Output::SetRoles(roles));
        for client in self.clients() {
            let Some(connection) = self.connections.get_mut(&client) else {
                continue;
            };
            connection.left.remove(leg);
            if connection.remove_leg(leg) || connection.has_own_roles {
                self.update_connection_roles(now, client);
            }
        }
        self.outputs.push_back(Output::SendAllWindowUpdates);
        self.with_backup(|sender, io| sender.on_roles(now, io.roles, io));
    }

    /// Makes a leg the primary of the service. The former one goes on as a replica.
    pub(super) fn promote_leg(&mut self, now: Duration, leg: LegIndex) {
        let former = self.legs.primary;
        self.legs.primary = leg;
        self.report(Event::Promoted {
            leg,
            former,
            in_doubt: false,
        });
        self.publish_roles(now);
    }

    /// Puts changed roles of the service in force.
    pub(super) fn publish_roles(&mut self, now: Duration) {
        let roles = self.legs.roles();
        self.outputs.push_back(Output::SetRoles(roles));
        for client in self.clients() {
            self.update_connection_roles(now, client);
        }
        self.outputs.push_back(Output::SendAllWindowUpdates);
        self.with_backup(|sender, io| sender.on_roles(now, io.roles, io));
    }

    /// Decides on the legs of one connection, whose window updates have to be sent then.
    pub(super) fn update_connection_roles(&mut self, now: Duration, client: SocketAddr) {
        let Some(connection) = self.connections.get(&client) else {
            return;
        };
        let serving = self.legs.serving();
        let live = connection.record.live.intersection(serving);
        let standing = connection.standing();
        let Some(best) = self.legs.choose(live, &standing) else {
            return self.reset_client(now, client);
        };
        let service_primary = self.legs.primary;
        let is_wrong = |leg| self.legs.doubt(leg, &standing).is_about_output();
        let keeps_service_primary =
            live.contains(service_primary) && (!is_wrong(service_primary) || is_wrong(best));
        let primary = if keeps_service_primary {
            service_primary
        } else {
            best
        };
        let follows_service_roles = primary == service_primary && live == serving;
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        connection.primary = primary;
        if !follows_service_roles || connection.has_own_roles {
            connection.has_own_roles = !follows_service_roles;
            self.outputs.push_back(Output::SetConnectionRoles {
                client,
                primary,
                live,
                follows_service_roles,
            });
        }
    }

    /// Lets a leg leave one connection that others continue. With none left, the client is reset.
    pub(super) fn leave_connection(&mut self, now: Duration, client: SocketAddr, leg: LegIndex) {
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        if !connection.remove_leg(leg) {
            return;
        }
        connection.left.insert(leg);
        self.report(Event::LeftConnection { client, leg });
        self.tell_backup(now, ConnectionChange::LegLeft { client, leg });
        self.update_connection_roles(now, client);
        self.outputs.push_back(Output::SendWindowUpdate { client });
        self.check_server(leg);
    }

    /// Asks whether the server of a leg that ends connections still listens.
    pub(super) fn check_server(&mut self, leg: LegIndex) {
        if let Some(node) = self.legs.get(leg).map(|leg| leg.node) {
            self.outputs.push_back(Output::CheckServer { node });
        }
    }

    /// Resets the client's connection and forgets it.
    pub(super) fn reset_client(&mut self, now: Duration, client: SocketAddr) {
        if self.connections.contains_key(&client) {
            self.outputs.push_back(Output::ResetClient { client });
            self.forget_connection(now, client);
        }
    }

    /// Forgets a connection that has ended.
    pub(super) fn forget_connection(&mut self, now: Duration, client: SocketAddr) {
        let Some(connection) = self.connections.remove(&client) else {
            return;
        };
        self.is_full = false;
        if let Some(deadline) = connection.fin_deadline {
            self.fin_deadlines.remove(&(deadline, client));
        }
        self.tell_backup(now, ConnectionChange::Closed { client });
        for leg in LegIndex::all() {
            self.on_level(leg, client);
        }
    }

    /// Records that a new leg is level in a connection, or that the connection has ended.
    pub(super) fn on_level(&mut self, leg: LegIndex, client: SocketAddr) {
        let phase = self.legs.get_mut(leg).map(|leg| &mut leg.phase);
        if let Some(LegPhase::CatchingUp { not_level, .. }) = phase
            && not_level.remove(&client)
        {
            self.finish_if_level(leg);
        }
    }

    /// Lets a new leg count if it is level in all its connections.
    pub(super) fn finish_if_level(&mut self, leg: LegIndex) {
        let phase = self.legs.get_mut(leg).map(|leg| &mut leg.phase);
        if let Some(phase) = phase
            && matches!(phase, LegPhase::CatchingUp { not_level, .. } if not_level.is_empty())
        {
            *phase = LegPhase::CaughtUp;
            self.report(Event::CaughtUp { leg });
            self.update_protection();
        }
    }
}
