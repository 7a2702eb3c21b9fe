//! The handlespace of paper 001 section 3, with sets as balanced trees, red-black or treap: for comparison, no part of
//! the product.

mod red_black;
mod treap;
pub mod tree_handlespace;

pub use red_black::RedBlack;
pub use treap::Treap;

use std::fmt::Debug;
use std::marker::PhantomData;

/// Number 0 means no node; its sum is 0 and its colour black.
const NIL: u32 = 0;

/// Balancing of a tree.
pub trait BalanceScheme: Debug + Default {
    /// Rebalances the tree after a new leaf was linked.
    fn rebalance_after_insert<K>(nodes: &mut TreeNodes<K>, node: u32);
    /// Removes a node from the tree.
    fn remove_node<K>(nodes: &mut TreeNodes<K>, node: u32);
    /// Returns the mark of a new node; `random` is a random number.
    fn initial_mark(random: u32) -> u32;
}

/// An ordered map of keys to values. Each key has a weight, and each node the sum of its subtree's weights (paper 001
/// section 3.2).
#[derive(Debug)]
pub struct BalancedTree<K, B> {
    nodes: TreeNodes<K>,
    free: Vec<u32>,
    random: u32,
    balance: PhantomData<B>,
}

/// Nodes by number, and the root.
#[derive(Debug)]
pub struct TreeNodes<K> {
    nodes: Vec<TreeNode<K>>,
    root: u32,
}

/// A key with its value, weight and links.
#[derive(Debug)]
pub struct TreeNode<K> {
    /// `None` only in node 0.
    key: Option<K>,
    value: u32,
    weight: u64,
    sum: u64,
    children: [u32; 2],
    parent: u32,
    /// Colour or priority.
    balance_mark: u32,
}

impl<K: Copy + Ord, B: BalanceScheme> BalancedTree<K, B> {
    /// Creates an empty tree.
    pub fn new() -> BalancedTree<K, B> {
        BalancedTree {
            nodes: TreeNodes::new(),
            free: Vec::new(),
            random: 0x9e37_79b9,
            balance: PhantomData,
        }
    }

    /// Adds a new key with its value. Returns its node, which stays valid until removal.
    pub fn insert(&mut self, key: K, value: u32, weight: u64) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        let node = TreeNode {
            key: Some(key),
            value,
            weight,
            sum: weight,
            children: [NIL; 2],
            parent: NIL,
            balance_mark: B::initial_mark(self.random),
        };
        let number = match self.free.pop() {
            Some(number) => {
                self.nodes.nodes[number as usize] = node;
                number
            }
            None => {
                self.nodes.nodes.push(node);
                self.nodes.nodes.len() as u32 - 1
            }
        };
        self.nodes.link_leaf(number);
        B::rebalance_after_insert(&mut self.nodes, number);
        number
    }

    /// Removes a node from the tree.
    pub fn remove(&mut self, node: u32) {
        B::remove_node(&mut self.nodes, node);
        self.free.push(node);
    }

    /// Returns the tree node of a key.
    pub fn find(&self, key: &K) -> Option<u32> {
        let mut current = self.nodes.root;
        while current != NIL {
            match Some(key).cmp(&self.nodes[current].key.as_ref()) {
                std::cmp::Ordering::Less => current = self.nodes[current].children[0],
                std::cmp::Ordering::Greater => current = self.nodes[current].children[1],
                std::cmp::Ordering::Equal => return Some(current),
            }
        }
        None
    }

    /// Returns the key of a node.
    pub fn key(&self, node: u32) -> K {
        let Some(key) = self.nodes[node].key else {
            unreachable!("every node except NIL has a key");
        };
        key
    }

    /// Returns the value of a node's key.
    pub fn value(&self, node: u32) -> u32 {
        self.nodes[node].value
    }

    /// Returns the node of the lowest key.
    pub fn first(&self) -> Option<u32> {
        let root = self.nodes.root;
        (root != NIL).then(|| self.nodes.last_on_side(root, 0))
    }

    /// Returns the node of the next key.
    pub fn next(&self, node: u32) -> Option<u32> {
        let right = self.nodes[node].children[1];
        if right != NIL {
            return Some(self.nodes.last_on_side(right, 0));
        }
        let mut at = node;
        loop {
            let parent = self.nodes[at].parent;
            if parent == NIL {
                return None;
            }
            if self.nodes[parent].children[0] == at {
                return Some(parent);
            }
            at = parent;
        }
    }

    /// Returns the sum of all weights.
    pub fn total_weight(&self) -> u64 {
        self.nodes[self.nodes.root].sum
    }

    /// Returns the first node at which the sum of the weights up to and including it exceeds `point`, which must be
    /// below the total.
    pub fn node_at_weight(&self, mut point: u64) -> u32 {
        let mut at = self.nodes.root;
        loop {
            let TreeNode {
                children, weight, ..
            } = self.nodes[at];
            let before = self.nodes[children[0]].sum;
            if point < before {
                at = children[0];
            } else if point < before + weight {
                return at;
            } else {
                point -= before + weight;
                at = children[1];
            }
        }
    }

    /// Changes a node's weight, and the sums above it.
    pub fn set_weight(&mut self, node: u32, weight: u64) {
        self.nodes[node].weight = weight;
        self.nodes.update_sums_to_root(node);
    }
}

impl<K> std::ops::Index<u32> for TreeNodes<K> {
    type Output = TreeNode<K>;

    fn index(&self, node: u32) -> &TreeNode<K> {
        &self.nodes[node as usize]
    }
}

impl<K> std::ops::IndexMut<u32> for TreeNodes<K> {
    fn index_mut(&mut self, node: u32) -> &mut TreeNode<K> {
        &mut self.nodes[node as usize]
    }
}

impl<K> TreeNodes<K> {
    fn new() -> TreeNodes<K> {
        let none = TreeNode {
            key: None,
            value: 0,
            weight: 0,
            sum: 0,
            children: [NIL; 2],
            parent: NIL,
            balance_mark: 0,
        };
        TreeNodes {
            nodes: vec![none],
            root: NIL,
        }
    }

    /// Returns the index of a node among its parent's children.
    fn side_of(&self, node: u32) -> usize {
        let parent = self[node].parent;
        usize::from(self[parent].children[1] == node)
    }

    /// Returns the last node on one side of a subtree.
    fn last_on_side(&self, mut node: u32, side: usize) -> u32 {
        while self[node].children[side] != NIL {
            node = self[node].children[side];
        }
        node
    }

    /// Puts node `by` into the place of `node`, without the subtree of `node`.
    fn replace(&mut self, node: u32, by: u32) {
        let parent = self[node].parent;
        if parent == NIL {
            self.root = by;
        } else {
            let side = self.side_of(node);
            self[parent].children[side] = by;
        }
        self[by].parent = parent;
    }

    /// Rotates a node down to a side; its child of the other side takes its place.
    fn rotate(&mut self, node: u32, side: usize) {
        let up = self[node].children[1 - side];
        let inner = self[up].children[side];
        self[node].children[1 - side] = inner;
        if inner != NIL {
            self[inner].parent = node;
        }
        self.replace(node, up);
        self[up].children[side] = node;
        self[node].parent = up;
        self[up].sum = self[node].sum;
        self.update_sum(node);
    }

    fn update_sum(&mut self, node: u32) {
        let [left, right] = self[node].children;
        self[node].sum = self[node].weight + self[left].sum + self[right].sum;
    }

    /// Corrects the sums from a node up to the root.
    fn update_sums_to_root(&mut self, mut node: u32) {
        while node != NIL {
            self.update_sum(node);
            node = self[node].parent;
        }
    }
}

impl<K: Ord> TreeNodes<K> {
    /// Links a node as a leaf at the position of its key.
    fn link_leaf(&mut self, node: u32) {
        let (mut parent, mut side) = (NIL, 0);
        let mut at = self.root;
        while at != NIL {
            self.nodes[at as usize].sum += self[node].weight;
            parent = at;
            side = usize::from(self[node].key > self[at].key);
            at = self[at].children[side];
        }
        self[node].parent = parent;
        if parent == NIL {
            self.root = node;
        } else {
            self[parent].children[side] = node;
        }
    }
}

#[cfg(test)]
mod tests;
