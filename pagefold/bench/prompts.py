"""What the demo asks: explanations, stories, code, lists, reasoning, translations, and texts to work on."""

_LIGHTHOUSE = """\
The lighthouse on Varn Rock was finished in 1874, after nine years of work. The first two foundations were swept \
away in winter storms, and the engineer, Ada Lindqvist, moved the tower forty metres inland, against the wish of the \
harbour board, who feared that the light would be hidden by the cliff. She answered by making the tower twelve \
metres taller and by asking for a lens of the first order from a workshop in Paris. The lens arrived in eighty \
crates and was put together by three people over one summer. On its first night the light was seen from a mail \
steamer twenty-six miles away, farther than any other on that coast.

For sixty years the lamp burned oil, and four families lived on the rock. They kept goats, grew potatoes in soil \
that had been carried over in barrels, and taught their children from a chest of books that was exchanged each \
spring. In 1934 a cable brought electricity, and two of the families left. In 1971 the light became automatic and \
the last keeper, Jonas Berg, locked the door and rowed home. The tower stood empty until 1998, when a club of \
volunteers asked to look after it. They repaired the roof, took out the rotten floors, and found Lindqvist's \
drawings behind a panel, with a note in her hand: "The sea is patient, so we must be exact." Today some four \
thousand visitors come each year, and the fee they pay at the pier keeps the lamp room dry. The lens still turns, \
although ships no longer need it."""

_MEETING = """\
Minutes of the library committee, Tuesday evening. Present: Mara (chair), Tom, Ines, Yusuf, and Clara for the \
school.

Mara opened with the budget. The town gives 48,000 this year, 3,000 less than last year, and the heating bill has \
grown by a fifth. Tom proposed to close on Monday mornings, when the fewest people come; Ines was against, because \
the reading group for new parents meets then, and it is the only one in the valley. Yusuf suggested that volunteers \
could keep one room open on Mondays while the rest stays cold. It was agreed to try this for three months, from \
October.

Clara said the school would like to bring two classes a week instead of one, and asked whether the children's corner \
could have more tables. Ines has found six tables in the cellar of the old post office that cost nothing but the \
move. Tom will ask his brother for a van before the end of the month. Clara will send the dates of the classes by \
Friday.

The roof over the archive leaks again. Yusuf obtained two offers, one for 7,200 that replaces the whole north side, \
and one for 1,900 that mends the three worst places. Mara reminded everybody that the small repair of two years ago \
lasted eleven months. A decision was put off until the county answers whether it pays half of a full repair; Mara \
will call them on Thursday. Until then the boxes of the years 1890 to 1920 are moved to the first floor. All help on \
Saturday at ten. The next meeting is on the second Tuesday of October, at Tom's house, because the hall is being \
painted."""

_RECIPE = """\
My grandmother's bread takes two days, and most of that is waiting. On the first evening, mix 200 grams of rye flour \
with 200 grams of lukewarm water and two spoons of the sour starter that lives in the refrigerator. Cover the bowl \
with a plate, not with a cloth, and leave it on the warm side of the kitchen. In the morning it should smell of \
apples and have a domed top with small holes. Take two spoons of it back into the jar before you do anything else; \
she forgot this once in 1962 and spoke of it for the rest of her life.

Then add 500 grams of wheat flour, 15 grams of salt, a spoon of honey and about 280 grams of water. The dough should \
stick to the hand but not to the bowl. Do not knead it. Fold it over itself four times, wait for half an hour, and \
do this three times more. Between the folds it becomes smooth without any effort of yours. After the last fold, let \
it rise until it has grown by half, which takes two hours in summer and four in winter. Shape a round loaf, put it \
into a floured basket, and place the basket in the refrigerator until the evening.

Heat the oven as high as it goes, with an iron pot inside, for at least forty minutes. Turn the loaf into the hot \
pot, cut a cross into it, close the lid, and bake for twenty-five minutes. Then take the lid off, lower the heat to \
210 degrees, and bake for twenty minutes more, until it sounds hollow. Do not cut it before it is cold. Nobody in my \
family has ever obeyed this last rule."""

_RIVER = """\
Rivers are rarely straight for long. Where a channel bends a little, the water on the outside of the bend has a \
longer way to go and runs faster, and it takes soil from the bank. On the inside the water is slow and drops what it \
carries, so that a bank of sand grows there. The bend becomes wider, the difference grows, and a small accident of \
the ground becomes a loop. In the end two loops may come so close that the river breaks through the neck between \
them in a flood, takes the short way, and leaves the loop behind as a curved lake. Seen from the air, an old valley \
is full of such lakes, some still blue and some filled with reeds, and each of them tells where the river once was.

People have straightened rivers to win land and to let ships pass. The water then has a steeper way down and runs \
faster; it digs into its bed, the groundwater beside it sinks, and the meadows dry out. Towns downstream get higher \
floods, because the water that used to spread over the valley for days now arrives all at once. In the last thirty \
years some rivers have been given their bends back. Fish returned first, since they need slow water to lay their \
eggs, and then the birds that eat them. The works cost less than the dams that would otherwise have been needed, but \
they need land, and the land has owners. A river that may move is a neighbour who does not keep to the fence."""

PROMPTS = [
    "Explain to a curious ten-year-old why the sky is blue and why sunsets are red.",
    "Write a story about a clockmaker who finds a clock that runs backwards.",
    "Write a Python class for a bank account with deposit, withdraw and transfer, and explain each method.",
    "Give me a detailed packing list for a two-week hiking trip in the mountains, and say why each thing is needed.",
    f"Summarize the following text in your own words, then list the people and dates in it.\n\n{_LIGHTHOUSE}",
    "A farmer has chickens and rabbits, 35 heads and 94 legs in all. How many of each? Explain every step.",
    "How does a refrigerator work? Go through the cycle step by step.",
    "Translate these sentences into French and explain the grammar of each: I am reading a book. We have been waiting "
    "for an hour. If it rains tomorrow, they will stay at home.",
    "Write a long poem about winter in a small fishing village.",
    f"Here are the minutes of a meeting. List the decisions, who does what, and by when.\n\n{_MEETING}",
    "Compare trains and airplanes for a journey of 500 miles: time, cost, comfort and the environment.",
    "Write a dialogue between a teacher and a student about why fractions are divided by turning one of them over.",
    "Explain how vaccines train the immune system, and what memory cells do.",
    "Write a shell script that backs up a folder every night and keeps the last seven copies. Explain each line.",
    "Describe a day in the life of a medieval baker, from before sunrise to the evening.",
    f"Rewrite this recipe as a numbered list of steps with times, then list all ingredients.\n\n{_RECIPE}",
    "What are the main causes of the French Revolution? Discuss each of them.",
    "Plan a week of healthy vegetarian dinners, with ingredients and short instructions for each.",
    "Write a detective story in which the only witness is a parrot.",
    "Explain the difference between supervised and unsupervised learning, with examples of both.",
    f"Read the text, then explain in detail why straightened rivers cause floods, and what can be done.\n\n{_RIVER}",
    "Give advice to somebody who has to speak in public for the first time and is afraid of it.",
    "Three friends share a bill of 84 dollars; one pays twice as much as each of the others. Who pays what, and why?",
    "Write a letter from an astronaut on Mars to a younger sister on Earth.",
]

COMPARED = (1, 4)  # whose answers the demo shows side by side: a story, and a long text to sum up
