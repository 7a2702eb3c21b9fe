//! Handle tables: the handlespace, in blocks, for a peer that asks (RFC 5353 sections 3.2.3 and 3.6.3).

use super::associations::Associations;
use super::timer_queue::RegistrarTimer;
use super::{AssociationId, Registrar};
use holdfast_handlespace::ElementCursor;
use holdfast_wire::rserpool::RegistrarId;
use holdfast_wire::rserpool::enrp::{EnrpBody, HandleTableEncoder};
use std::time::Duration;

/// Progress of a peer's download.
#[derive(Debug)]
pub(super) struct TableDownload {
    own_only: bool,
    cursor: ElementCursor,
}

impl Registrar {
    pub(super) fn on_table_request(
        &mut self,
        now: Duration,
        from: AssociationId,
        peer: RegistrarId,
        own_only: bool,
    ) {
        let open_download = self.associations.take_download(from);
        if open_download.is_some() {
            self.schedule.stop(RegistrarTimer::DownloadTimeout(from));
        }
        if !self.is_ready()
            || !self.orphaned_elements.is_empty()
            || self.associations.downloads() >= self.config.settings.downloads_max
        {
            let body = EnrpBody::HandleTableResponse {
                rejected: true,
                more: false,
                entries: Vec::new(),
            };
            return self.outbox.send_enrp(from, peer, body);
        }
        let download = match open_download {
            Some(begun) if begun.own_only == own_only => begun,
            _ => TableDownload {
                own_only,
                cursor: match own_only {
                    true => ElementCursor::owned_by(self.config.id),
                    false => ElementCursor::all(),
                },
            },
        };
        if let Some(unfinished) = self.send_block(from, peer, download) {
            self.associations.set_download(from, unfinished);
            let until = now + self.config.settings.no_response_max;
            self.schedule
                .set(RegistrarTimer::DownloadTimeout(from), until);
        }
    }

    /// Sends the next block; returns the remaining download, if any.
    fn send_block(
        &mut self,
        to: AssociationId,
        peer: RegistrarId,
        mut download: TableDownload,
    ) -> Option<TableDownload> {
        let settings = &self.config.settings;
        let (own_id, bytes_max, elements_max) = (
            self.config.id,
            settings.table_bytes_max,
            settings.table_elements_max,
        );
        let space = self.elements.space();
        let cursor = &mut download.cursor;
        let mut more = false;
        self.outbox.send_enrp_with(to, |buffer| {
            let mut table = HandleTableEncoder::new(buffer, own_id, peer, bytes_max);
            let mut elements = 0;
            while elements < elements_max {
                let before = cursor.clone();
                let mut fits = true;
                let visited = space.next_block(cursor, 1, |element| {
                    fits = table.push(element.handle(), &element.payload().element);
                });
                if visited == 0 {
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
}

impl Associations {
    /// Ends a download. "If this timer expires without receiving another request […], the mentor peer SHOULD abort the
    /// session".
    pub(super) fn abort_download(&mut self, association: AssociationId) {
        self.take_download(association);
    }
}
