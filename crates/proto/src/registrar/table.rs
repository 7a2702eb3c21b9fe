//! Handle tables: the handlespace, in blocks, for a peer that asks (RFC 5353 sections 3.2.3 and 3.6.3).

use super::schedule::Timer;
use super::{AssociationId, Registrar};
use holdfast_handlespace::Cursor;
use holdfast_wire::rserpool::RegistrarId;
use holdfast_wire::rserpool::enrp::{Body, HandleTable};
use std::time::Duration;

/// Progress of a peer's download.
#[derive(Debug)]
pub(super) struct Download {
    own_only: bool,
    cursor: Cursor,
}

impl Registrar {
    pub(super) fn table_asked(
        &mut self,
        now: Duration,
        from: AssociationId,
        peer: RegistrarId,
        own_only: bool,
    ) {
        let begun = self
            .associations
            .get_mut(from)
            .and_then(|a| a.download.take());
        if begun.is_some() {
            self.downloads -= 1;
            self.schedule.stop(Timer::Download(from));
        }
        if !self.is_ready()
            || !self.is_settled()
            || self.downloads >= self.config.settings.downloads_max
        {
            let body = Body::HandleTableResponse {
                rejected: true,
                more: false,
                entries: Vec::new(),
            };
            return self.out.enrp(from, peer, body);
        }
        let download = match begun {
            Some(begun) if begun.own_only == own_only => begun,
            _ => Download {
                own_only,
                cursor: match own_only {
                    true => Cursor::owned_by(self.config.id),
                    false => Cursor::all(),
                },
            },
        };
        if let Some(rest) = self.send_block(from, peer, download) {
            self.downloads += 1;
            if let Some(association) = self.associations.get_mut(from) {
                association.download = Some(rest);
            }
            let until = now + self.config.settings.no_response_max;
            self.schedule.set(Timer::Download(from), until);
        }
    }

    /// Sends the next block; returns the remaining download, if any.
    fn send_block(
        &mut self,
        to: AssociationId,
        peer: RegistrarId,
        mut download: Download,
    ) -> Option<Download> {
        let settings = &self.config.settings;
        let (own, bytes_max, elements_max) = (
            self.config.id,
            settings.table_bytes_max,
            settings.table_elements_max,
        );
        let space = &self.space;
        let cursor = &mut download.cursor;
        let mut more = false;
        self.out.enrp_with(to, |buffer| {
            let mut table = HandleTable::new(buffer, own, peer, bytes_max);
            let mut elements = 0;
            while elements < elements_max {
                let before = cursor.clone();
                let mut fits = true;
                let shown = space.next_block(cursor, 1, |element| {
                    fits = table.push(element.handle(), &element.payload().element);
                });
                if shown == 0 {
                    break;
                }
                // An element that does not fit into an empty block fits into none, and is skipped.
                if !fits && elements > 0 {
                    *cursor = before;
                    break;
                }
                elements += 1;
            }
            more = space.next_block(&mut cursor.clone(), 1, |_| ()) > 0;
            table.finish(more)
        });
        more.then_some(download)
    }

    /// Ends a download. "If this timer expires without receiving another request […], the mentor peer SHOULD abort the
    /// session".
    pub(super) fn end_download(&mut self, association: AssociationId) {
        if let Some(association) = self.associations.get_mut(association)
            && association.download.take().is_some()
        {
            self.downloads -= 1;
        }
    }
}
